"""MXFP4 (OCP microscaling): e2m1 in groups of 32 along the input side, E8M0 scales."""

from __future__ import annotations

from typing import Final

from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.granularity import PerTensor, PerToken
from quant_spec.quant_key import MXFP4 as KEY
from quant_spec.quant_key import MXFP8, QuantKey, ScaleDesc

MXFP4: Final = register_format(
    QuantFormat(
        name="mxfp4",
        summary="FP4 e2m1 in groups of 32 with E8M0 scales; activations the same",
        weight=KEY,
        activation=KEY.as_activation(dynamic=True),
        allowed_activations=(
            MXFP8.as_activation(dynamic=True),
            QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=True)),
            QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=False)),
            QuantKey(FP8_E4M3, ScaleDesc(FP32, PerToken(), dynamic=True)),
        ),
        scale_roundings=("even", "floor", "rceil"),
        k_multiple=32,
        reference="quant_kernels.reference:quantize_mxfp4",
        dequantize="quant_kernels.reference:dequantize_mxfp4",
    )
)
