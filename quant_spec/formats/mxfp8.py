"""MXFP8 (OCP microscaling): e4m3 in groups of 32 along the input side, E8M0 scales."""

from __future__ import annotations

from typing import Final

from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.quant_key import MXFP8 as KEY

MXFP8: Final = register_format(
    QuantFormat(
        name="mxfp8",
        summary="FP8 e4m3 in groups of 32 with E8M0 scales; activations the same",
        weight=KEY,
        activation=KEY.as_activation(dynamic=True),
        scale_roundings=("rceil", "even", "floor"),
        k_multiple=32,
        reference="quant_kernels.reference:quantize_mxfp8",
        dequantize="quant_kernels.reference:dequantize_mxfp8",
    )
)
