"""LayerQuantConfig: what one layer's weight and activation are, as serving engines read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.dtypes import BF16, ElementType
from quant_spec.formats import engine_quant_type, format_of_key
from quant_spec.quant_key import QuantKey
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    import torch


def _none_if_empty(method: str | None) -> str | None:
    return method or None


@attrs.frozen
class LayerQuantConfig:
    """The format of one layer.

    Attributes:
        weight: key of the weight; None: unquantized; UNSET (inside parsed requests only): what the checkpoint has.
        activation: key of the activation; None: unquantized; UNSET: the default of the weight's format.
        quant_method: who says so (`online`, `quark`, `fp8`, …); None: nobody named.
    """

    weight: QuantKey | UnsetType | None = None
    activation: QuantKey | UnsetType | None = None
    quant_method: str | None = attrs.field(default=None, converter=_none_if_empty)

    def resolved(self) -> LayerQuantConfig:
        """Return a copy without UNSET: an absent activation becomes the default of the weight's format."""
        weight = self.weight or None
        if self.activation is not UNSET:
            return self if self.weight is not UNSET else attrs.evolve(self, weight=weight)
        known = format_of_key(weight) if weight else None
        return attrs.evolve(self, weight=weight, activation=known.activation if known else None)

    @property
    def weight_key(self) -> QuantKey | None:
        """The weight's key, or None if it is unquantized or left to the checkpoint."""
        return self.weight or None

    @property
    def activation_key(self) -> QuantKey | None:
        """The activation's key with the format's default in place of UNSET."""
        return self.resolved().activation or None

    @property
    def is_quantized(self) -> bool:
        """True if the weight is stored in a quantized format."""
        return self.weight_key is not None

    @property
    def quant_type(self) -> str:
        """Granularity of the weight in the engines' words: `No`, `per_Token`, `per_1x32`, `per_1x128`, …."""
        return engine_quant_type(self.weight_key)

    @property
    def element(self) -> ElementType:
        """Element type of the weight; bf16 for an unquantized one."""
        return self.weight_key.element if self.weight_key else BF16

    @property
    def quant_dtype(self) -> torch.dtype:
        """Dtype in torch of the stored weight (MXFP4: `float4_e2m1fn_x2`). Imports torch."""
        return self.element.torch_dtype

    @property
    def is_dynamic(self) -> bool:
        """True if the activation is quantized with scales made at run time."""
        key = self.activation_key
        return key is not None and key.is_dynamic

    def __str__(self) -> str:
        """Return `weight x activation` in the words of the documents."""
        return f"{word(self.weight)} x {word(self.activation)}"


UNQUANTIZED: Final = LayerQuantConfig()
"""Weight and activation in the model's own dtype, nobody named."""


def word(key: QuantKey | UnsetType | None) -> str:
    """Return the word of a key in documents: `none` for None, `default` for UNSET, else `str(key)`."""
    if key is UNSET:
        return "default"
    return "none" if key is None else str(key)
