"""INT8 weights with one scale an output row, activations unquantized: named by vLLM requests for experts."""

from __future__ import annotations

from typing import Final

from quant_spec.dtypes import FP32, INT8
from quant_spec.formats.base import QuantFormat, register_format
from quant_spec.granularity import PerChannel
from quant_spec.quant_key import QuantKey, ScaleDesc

INT8_PER_CHANNEL: Final = register_format(
    QuantFormat(
        name="int8_per_channel",
        summary="INT8, one fp32 scale per output row; activations unquantized",
        weight=QuantKey(INT8, ScaleDesc(FP32, PerChannel())),
        activation=None,
        shorthands=("int8_per_channel_weight_only",),
        slots=("moe",),
        requestable=False,
    )
)
