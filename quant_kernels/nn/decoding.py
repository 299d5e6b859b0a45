"""Decoding modules: those that use their weight in a way of their own hold it quantized, and decode it when they ask.

Routers are such modules: their class multiplies by `self.weight` itself and does more besides. The decoded weight
lives as long as the forward pass needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quant_kernels.conversion import dequantize
from quant_kernels.nn.packed import PackedModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class DecodingModule(PackedModule):
    """A module whose `weight` is decoded whenever it is read; mixed into the model's own class by `decoding_class`.

    Attributes:
        decoded_dtype: dtype of what is read.
    """

    decoded_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight [N, K], decoded anew."""
        held = self._parameters["weight"]
        assert held is not None  # noqa: S101  (hold() has registered it)
        return held if held.device.type == "meta" else dequantize(self.quantized("weight"), self.decoded_dtype)


_made: Final[dict[type[nn.Module], type[DecodingModule]]] = {}


def decoding_class(cls: type[nn.Module]) -> type[DecodingModule]:
    """Return a class that keeps everything of `cls` and decodes its weight when it is read."""
    if cls not in _made:
        _made[cls] = type(f"Decoding{cls.__name__}", (DecodingModule, cls), {"__module__": __name__})
    return _made[cls]
