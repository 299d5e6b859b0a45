"""Names: renames from checkpoint to module spelling, fused modules, expert containers. Values, never changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import attrs

from quant_spec.errors import ArgumentError, ConfigError, Defect, shown, unknown, wrong_type
from quant_spec.patterns import EXPERTS

MAX_EXPERTS: Final = 16_384
"""Routed experts of a container."""
_LISTED_DEFECTS: Final = 24
DEFAULT_EXPERT_LEAVES: Final = ("gate_proj", "up_proj", "down_proj")

PairTuple: TypeAlias = "tuple[tuple[str, str], ...]"
PackedTuple: TypeAlias = "tuple[tuple[str, tuple[str, ...]], ...]"


def _items(name: str, value: object) -> list[tuple[str, object]]:
    """Return keys and values of a mapping, or of an iterable of such pairs; the keys are strings."""
    if isinstance(value, Mapping):
        pairs: list[object] = list(value.items())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        pairs = list(value)
    else:
        raise ConfigError(wrong_type(name, value, "object", "list of pairs"))
    items: list[tuple[str, object]] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004  (key and value)
            raise ConfigError(wrong_type(f"{name}[{index}]", pair, "a pair"))
        if not isinstance(pair[0], str):
            raise ConfigError(Defect(name, f"key {shown(pair[0])} is no string", pair[0]))
        items.append((pair[0], pair[1]))
    return items


def _pairs(value: object) -> PairTuple:
    items = _items("name_mapping", value)
    defects = [
        wrong_type(f"name_mapping[{shown(old)}]", new, "string") for old, new in items if not isinstance(new, str)
    ]
    defects += [Defect("name_mapping", "empty rule", old) for old, _ in items if not old.strip(".")]
    if defects:
        raise ConfigError(defects)
    return tuple((old, str(new)) for old, new in items)


def _packed(value: object) -> PackedTuple:
    name = "packed_modules_mapping"
    return tuple((fused, _strings(f"{name}[{shown(fused)}]", shards)) for fused, shards in _items(name, value))


def _strings(path: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(wrong_type(path, value, "list of strings"))
    listed = tuple(value)
    if not set(map(type, listed)) <= {str}:
        defects = [
            wrong_type(f"{path}[{index}]", each, "string")
            for index, each in enumerate(listed)
            if not isinstance(each, str)
        ]
        raise ConfigError(defects[:_LISTED_DEFECTS])
    return listed


def _leaves(value: object) -> tuple[str, ...]:
    return _strings("expert_leaves", value)


def _tensors(value: object) -> frozenset[str] | None:
    return None if value is None else frozenset(_strings("tensors", value))


def _experts(value: int | None) -> int | None:
    given: object = value  # callers may not check types
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MAX_EXPERTS):
        return given
    raise ConfigError(
        Defect("num_experts", f"no number of experts: {shown(value)}", value, (f"0 to {MAX_EXPERTS}", "null"))
    )


@attrs.frozen
class RenameRule:
    """One rename. Dots at the ends of a rule only mark segment bounds.

    Attributes:
        old: segments to find, without outer dots.
        new: what they become, without outer dots.
        anywhere: True if the rule was written with a leading dot: it fits at any segment bound, else at the start.
    """

    old: str
    new: str
    anywhere: bool

    @classmethod
    def parse(cls, old: str, new: str) -> RenameRule:
        """Return the rule as written in a mapping."""
        return cls(old.strip("."), new.strip("."), old.startswith("."))

    def reversed(self) -> RenameRule:
        """Return the rule that undoes this one."""
        return RenameRule(self.new, self.old, self.anywhere)

    def places(self, name: str) -> list[int]:
        """Return the indices at which the rule fits in `name`."""
        if not self.old:
            return [0] if not self.anywhere else []
        padded = f".{name}."
        wanted = f".{self.old}."
        if not self.anywhere:
            return [0] if padded.startswith(wanted) else []
        found: list[int] = []
        at = padded.find(wanted)
        while at >= 0:
            found.append(at)
            at = padded.find(wanted, at + 1)
        return found

    def apply(self, name: str, at: int) -> str:
        """Return `name` with the segments at index `at` replaced."""
        parts = (name[:at].rstrip("."), self.new, name[at + len(self.old) :].lstrip("."))
        return ".".join(part for part in parts if part)


@attrs.frozen
class NameRules:
    """How the names of a checkpoint and the modules of an engine relate.

    Attributes:
        name_mapping: renames from checkpoint spelling to module spelling, for entries of the checkpoint's own config.
        packed_modules_mapping: last segment of a fused module -> last segments of its shards.
        num_experts: routed experts of a container, or None.
        expert_leaves: projections of one expert.
        tensors: names of all tensors of the checkpoint, or None if unknown.
    """

    name_mapping: PairTuple = attrs.field(default=(), converter=_pairs)
    packed_modules_mapping: PackedTuple = attrs.field(default=(), converter=_packed)
    num_experts: int | None = attrs.field(default=None, converter=_experts)
    expert_leaves: tuple[str, ...] = attrs.field(default=DEFAULT_EXPERT_LEAVES, converter=_leaves)
    tensors: frozenset[str] | None = attrs.field(default=None, converter=_tensors, repr=False)

    @functools.cached_property
    def rules(self) -> tuple[RenameRule, ...]:
        """The renames, longest first: of the rules that fit, the longest is applied, once."""
        rules = [RenameRule.parse(old, new) for old, new in self.name_mapping]
        return tuple(sorted(rules, key=lambda rule: -len(rule.old)))

    @functools.cached_property
    def _packed(self) -> dict[str, tuple[str, ...]]:
        return dict(self.packed_modules_mapping)

    def to_module(self, name: str) -> str:
        """Return the module spelling of a checkpoint name.

        >>> NameRules(name_mapping={"language_model.model.": "model."}).to_module("language_model.model.layers.0")
        'model.layers.0'
        """
        for rule in self.rules:
            places = rule.places(name)
            if places:
                return rule.apply(name, places[0])
        return name

    def to_checkpoint(self, name: str) -> tuple[str, ...]:
        """Return every checkpoint name that the mapping sends to the module `name`, other than `name` itself."""
        found: dict[str, None] = {}
        for rule in self.rules:
            back = rule.reversed()
            for place in back.places(name):
                candidate = back.apply(name, place)
                if candidate != name and self.to_module(candidate) == name:
                    found[candidate] = None
        return tuple(found)

    def shards(self, name: str) -> tuple[str, ...]:
        """Return the full names of the shards of a fused module, or () if `name` is not fused."""
        parent, _, leaf = name.rpartition(".")
        shards = self._packed.get(leaf, ())
        return tuple(f"{parent}.{shard}" if parent else shard for shard in shards)

    def with_modules(self, **changes: object) -> NameRules:
        """Return a copy with the given attributes replaced.

        Raises:
            ArgumentError: there is no attribute of a name.
            ConfigError: an attribute cannot be what is given.
        """
        known = [field.name for field in attrs.fields(NameRules)]
        strays = [name for name in changes if name not in known]
        if strays:
            raise ArgumentError(str(unknown("with_modules", "attribute", strays[0], known)))
        return attrs.evolve(self, **changes)  # type: ignore[arg-type]  # attrs checks the names


def is_container(name: str) -> bool:
    """Tell whether a module holds routed experts: its last segment is `experts`."""
    return name.rpartition(".")[2] == EXPERTS
