"""FP8 with one scale a tensor (or a shard of a fused tensor): read from checkpoints, named by vLLM requests."""

from __future__ import annotations

from typing import Final

from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.granularity import PerTensor
from quant_spec.quant_key import QuantKey, ScaleDesc

_KEY: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor()))

FP8_PER_TENSOR: Final = register_format(
    QuantFormat(
        name="fp8_per_tensor",
        summary="FP8 e4m3, one fp32 scale per tensor; activations the same",
        weight=_KEY,
        activation=_KEY.as_activation(dynamic=True),
        allowed_activations=(_KEY.as_activation(dynamic=False),),
        requestable=False,
    )
)
