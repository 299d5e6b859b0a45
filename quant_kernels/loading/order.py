"""The order in which ranks come to layers: made from names alone, so that it is one order whatever each rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class Named(Protocol):
    """Anything with a layer's name."""

    @property
    def name(self) -> str:
        """The name."""
        ...


N = TypeVar("N", bound=Named)


def name_key(name: str) -> tuple[bool, tuple[tuple[bool, int, str], ...]]:
    """Return what sorts layer names: by segment, numbers by their value; names without a number come last.

    The last are output heads and the like: their tensors are the last of a checkpoint, and layers before them need not
    wait for those.

    >>> sorted(["lm_head", "model.layers.10.mlp", "model.layers.2.mlp", "model.layers.2.attn"], key=name_key)
    ['model.layers.2.attn', 'model.layers.2.mlp', 'model.layers.10.mlp', 'lm_head']
    """
    segments = name.split(".")
    numbered = any(each.isdecimal() for each in segments)
    parts = tuple((each.isdecimal(), int(each) if each.isdecimal() else 0, each) for each in segments)
    return not numbered, parts


def in_name_order(layers: Iterable[N]) -> list[N]:
    """Return layers in the order of their names (`name_key`)."""
    return sorted(layers, key=lambda layer: name_key(layer.name))
