"""NVFP4: e2m1 in groups of 16 with e4m3 scales and one fp32 scale of the scales a tensor."""

from __future__ import annotations

from typing import Final

from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.quant_key import NVFP4 as KEY

NVFP4: Final = register_format(
    QuantFormat(
        name="nvfp4",
        summary="FP4 e2m1 in groups of 16 with e4m3 scales and one fp32 scale per tensor",
        weight=KEY,
        activation=KEY.as_activation(dynamic=True),
        k_multiple=16,
        reference="quant_kernels.reference:quantize_nvfp4",
        dequantize="quant_kernels.reference:dequantize_nvfp4",
    )
)
