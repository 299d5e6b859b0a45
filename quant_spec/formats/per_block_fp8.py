"""Per-block FP8: e4m3 weights with one fp32 scale a 128 x 128 tile, activations in groups of 128 (DeepSeek-V3)."""

from __future__ import annotations

from typing import Final

from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.granularity import PerBlock, PerGroup
from quant_spec.quant_key import QuantKey, ScaleDesc

PER_BLOCK_FP8: Final = register_format(
    QuantFormat(
        name="per_block_fp8",
        summary="FP8 e4m3, one fp32 scale per 128x128 tile; activations in groups of 128",
        weight=QuantKey(FP8_E4M3, ScaleDesc(FP32, PerBlock(128, 128))),
        activation=QuantKey(FP8_E4M3, ScaleDesc(FP32, PerGroup(128), dynamic=True)),
        aliases=("per_block128_fp8",),
        shorthands=("fp8_per_block",),
        reference="quant_kernels.reference:quantize_per_block_fp8",
        dequantize="quant_kernels.reference:dequantize_per_block_fp8",
    )
)
