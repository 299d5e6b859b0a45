"""Names: renames from checkpoint to module spelling, fused modules, expert containers. Values, never changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import attrs

from quant_spec.errors import ConfigError, Defect, wrong_type
from quant_spec.patterns import EXPERTS

DEFAULT_EXPERT_LEAVES: Final = ("gate_proj", "up_proj", "down_proj")

PairTuple: TypeAlias = "tuple[tuple[str, str], ...]"
PackedTuple: TypeAlias = "tuple[tuple[str, tuple[str, ...]], ...]"


def _pairs(value: Mapping[str, str] | PairTuple) -> PairTuple:
    items: tuple[tuple[str, object], ...] = tuple(value.items() if isinstance(value, Mapping) else value)
    defects = [wrong_type(f"name_mapping[{old!r}]", new, "string") for old, new in items if not isinstance(new, str)]
    defects += [Defect("name_mapping", "empty rule", old) for old, _ in items if not old.strip(".")]
    if defects:
        raise ConfigError(defects)
    return tuple((old, str(new)) for old, new in items)


def _packed(value: Mapping[str, Iterable[str]] | PackedTuple) -> PackedTuple:
    items = value.items() if isinstance(value, Mapping) else value
    return tuple((fused, tuple(shards)) for fused, shards in items)


def _tuple(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


def _strings(value: Iterable[str] | None) -> frozenset[str] | None:
    return None if value is None else frozenset(value)


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
    num_experts: int | None = None
    expert_leaves: tuple[str, ...] = attrs.field(default=DEFAULT_EXPERT_LEAVES, converter=_tuple)
    tensors: frozenset[str] | None = attrs.field(default=None, converter=_strings, repr=False)

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
        """Return a copy with the given attributes replaced."""
        return attrs.evolve(self, **changes)  # type: ignore[arg-type]  # attrs checks the names


def is_container(name: str) -> bool:
    """Tell whether a module holds routed experts: its last segment is `experts`."""
    return name.rpartition(".")[2] == EXPERTS
