"""What parsers share: entries to patterns, and the keys that many methods use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quant_spec.dtypes import ELEMENT_TYPES, FP8_E4M3, FP32, ElementType
from quant_spec.errors import ConfigError, Defect, join_path
from quant_spec.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.patterns import Pattern, Scope
from quant_spec.quant_key import QuantKey, ScaleDesc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quant_spec.unset import UnsetType

EXCLUDE_KEYS: Final = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
"""Names that producers give to the list of modules left unquantized; where several are present they are joined."""

FP8_STATIC: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=False))
FP8_DYNAMIC: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor(), dynamic=True))
FP8_PER_TOKEN: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerToken(), dynamic=True))


def patterns(
    entries: Iterable[str] | UnsetType | None, path: str, scope: Scope, *, classes: bool = False
) -> tuple[Pattern, ...]:
    """Return the patterns of a list of entries at `path`; empty entries match nothing and are left out."""
    return Pattern.parse_all(tuple(entries or ()), path, scope, classes=classes)


def joined(
    document: Mapping[str, object],
    lists: Mapping[str, Iterable[str] | UnsetType | None],
    scope: Scope,
    root: str = "$",
) -> tuple[Pattern, ...]:
    """Return the patterns of several exclude lists by key, in the order of the keys in `document` (at path `root`)."""
    found: tuple[Pattern, ...] = ()
    for key in document:
        if key in lists:
            found += patterns(lists[key], join_path(root, key), scope)
    return found


def int_element(bits: int, *, symmetric: bool, path: str = "$") -> ElementType:
    """Return the element of integer weights: `intN`, or `uintN` with zero points.

    Raises:
        ConfigError: no element type has that width.
    """
    name = f"{'' if symmetric else 'u'}int{bits}"
    found = ELEMENT_TYPES.get(name)
    if found is None:
        known = sorted(each for each in ELEMENT_TYPES if each.lstrip("u").startswith("int"))
        raise ConfigError(Defect(path, f"no element type {name}", bits, tuple(known)))
    return found


def int_weight(bits: int, group_size: int, *, symmetric: bool, path: str = "$") -> QuantKey:
    """Return the key of integer weights in groups of `group_size` (-1: one scale a row); the scale dtype is open."""
    granularity: Granularity = PerChannel() if group_size == -1 else PerGroup(group_size)
    element = int_element(bits, symmetric=symmetric, path=path)
    return QuantKey(element, ScaleDesc(None, granularity), symmetric=symmetric)


def layer(weight: QuantKey | None, activation: QuantKey | None, method: str) -> LayerQuantConfig:
    """Return the config of a layer of a checkpoint; weight None: unquantized."""
    return LayerQuantConfig(weight, activation, method)
