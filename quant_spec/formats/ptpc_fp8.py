"""PTPC FP8: e4m3 weights with one fp32 scale an output row, activations with one scale a token."""

from __future__ import annotations

from typing import Final

from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.granularity import PerChannel, PerToken
from quant_spec.quant_key import QuantKey, ScaleDesc

PTPC_FP8: Final = register_format(
    QuantFormat(
        name="ptpc_fp8",
        summary="FP8 e4m3, one fp32 scale per output row; activations per token",
        weight=QuantKey(FP8_E4M3, ScaleDesc(FP32, PerChannel())),
        activation=QuantKey(FP8_E4M3, ScaleDesc(FP32, PerToken(), dynamic=True)),
        shorthands=("fp8_per_channel",),
        reference="quant_kernels.reference:quantize_ptpc_fp8",
        dequantize="quant_kernels.reference:dequantize_ptpc_fp8",
    )
)
