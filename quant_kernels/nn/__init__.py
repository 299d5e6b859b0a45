"""Modules that hold quantized weights and compute with them."""

from __future__ import annotations

from quant_kernels.nn.decoding import decoding_class as decoding_class
from quant_kernels.nn.experts import QuantizedExperts as QuantizedExperts
from quant_kernels.nn.experts import experts_class as experts_class
from quant_kernels.nn.linear import QuantizedLinear as QuantizedLinear
from quant_kernels.nn.packed import PackedModule as PackedModule
from quant_kernels.nn.packed import PackedWeight as PackedWeight

__all__ = [
    "PackedModule",
    "PackedWeight",
    "QuantizedExperts",
    "QuantizedLinear",
    "decoding_class",
    "experts_class",
]
