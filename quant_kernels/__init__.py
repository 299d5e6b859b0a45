"""Kernels that quantize weights when a model is loaded, and the driver that applies them to a whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quant_kernels.conversion import dequantize as dequantize
    from quant_kernels.conversion import quantize as quantize
    from quant_kernels.conversion import quantize_many as quantize_many
    from quant_kernels.conversion import requantize as requantize
    from quant_kernels.conversion import requantize_many as requantize_many
    from quant_kernels.fnuz import e4m3fn_to_e4m3fnuz as e4m3fn_to_e4m3fnuz
    from quant_kernels.loading.checkpoint import quantize_checkpoint as quantize_checkpoint
    from quant_kernels.loading.compare import compare_checkpoints as compare_checkpoints
    from quant_kernels.loading.model import plan_model as plan_model
    from quant_kernels.loading.model import quantize_model as quantize_model
    from quant_kernels.loading.parallel import quantize_shard as quantize_shard
    from quant_kernels.loading.streaming import OnlineQuantizer as OnlineQuantizer
    from quant_kernels.maxima import amax as amax
    from quant_kernels.quantized import QuantizedTensor as QuantizedTensor
    from quant_kernels.quantized_linear import linear as linear

_EXPORTS = {
    "OnlineQuantizer": "quant_kernels.loading.streaming",
    "QuantizedTensor": "quant_kernels.quantized",
    "amax": "quant_kernels.maxima",
    "compare_checkpoints": "quant_kernels.loading.compare",
    "dequantize": "quant_kernels.conversion",
    "e4m3fn_to_e4m3fnuz": "quant_kernels.fnuz",
    "linear": "quant_kernels.quantized_linear",
    "plan_model": "quant_kernels.loading.model",
    "quantize": "quant_kernels.conversion",
    "quantize_checkpoint": "quant_kernels.loading.checkpoint",
    "quantize_many": "quant_kernels.conversion",
    "quantize_model": "quant_kernels.loading.model",
    "quantize_shard": "quant_kernels.loading.parallel",
    "requantize": "quant_kernels.conversion",
    "requantize_many": "quant_kernels.conversion",
}

__all__ = [*_EXPORTS]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that the command line starts without torch."""
    if name not in _EXPORTS:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module  # noqa: PLC0415  (not needed until a name is asked for)

    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    """List the public names beside the module's own."""
    return sorted({*globals(), *_EXPORTS})
