"""Matcher: what the entries of one config say of a module: plain, fused, or a container of experts.

A fused module takes what its shards agree on, a container what its leaves agree on; disagreement is an error that
names the members and the entries.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.errors import ResolveError, shown
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.mapping import NameRules, is_container
from quant_spec.patterns import EXPERTS, Pattern, PatternKind
from quant_spec.resolver import Resolver

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from quant_spec.parsers.base import PatternSpecs

MAX_NAME_LENGTH: Final = 4096
"""Characters of a module name."""
DEFAULT_CLASS: Final = "Linear"
"""Class of a module whose class is not given: what linear and fused-MoE modules count as."""
LINE_BREAK: Final = "\n"
"""What no module's name holds; `$` in an expression would see a line's end in it."""
_SHOWN_MEMBERS: Final = 4


class Why(str, enum.Enum):
    """Why a module has the format it has."""

    EXCLUDE = "exclude"
    PATTERN = "pattern"
    GLOBAL = "global"
    UNSUPPORTED = "unsupported"
    ALREADY = "already"

    def __str__(self) -> str:
        """Return the word of reports."""
        return self.value


_RANK: Final = {Why.EXCLUDE: 0, Why.PATTERN: 1, Why.GLOBAL: 2}


@attrs.frozen
class Outcome:
    """What the entries say of one module.

    Attributes:
        why: `EXCLUDE`, `PATTERN` or `GLOBAL`.
        entry: the entry that decided; None where nothing named the module.
        spec: the format asked for; an exclusion asks for nothing.
        members: shards or leaves that were asked in place of the module.
    """

    why: Why
    entry: Pattern | None
    spec: LayerQuantConfig
    members: tuple[str, ...] = ()


def check_name(name: str) -> None:
    """Raise unless `name` can be a module's name.

    Raises:
        ResolveError: it is empty, begins with a dot, holds a line break, or is longer than `MAX_NAME_LENGTH`.
    """
    if not name:
        message = "empty module name: no list can name it, so its format cannot be known"
    elif len(name) > MAX_NAME_LENGTH:
        message = f"module name {shown(name)}: longer than {MAX_NAME_LENGTH} characters"
    elif name[0] == ".":
        message = f"module name {shown(name)}: begins with a dot, so its first segment is empty"
    elif LINE_BREAK in name:
        message = f"module name {shown(name)}: holds a line break"
    else:
        return
    raise ResolveError(message)


class Matcher:
    """The entries of one config in one order of precedence: excludes, patterns, classes, then the global format."""

    def __init__(
        self,
        excludes: Sequence[Pattern],
        patterns: PatternSpecs,
        classes: PatternSpecs,
        global_spec: LayerQuantConfig,
        rules: NameRules,
        *,
        mapped: bool,
        below: Matcher | None = None,
    ) -> None:
        """Compile the entries; `mapped` if in checkpoint spelling; `below`: the checkpoint's, for a request."""
        excluded = LayerQuantConfig(None, None, global_spec.quant_method)
        self.entries: tuple[Pattern, ...] = (*excludes, *(entry for entry, _ in (*patterns, *classes)))
        self.outcomes: tuple[Outcome, ...] = (
            *(Outcome(Why.EXCLUDE, entry, excluded) for entry in excludes),
            *(Outcome(Why.PATTERN, entry, spec) for entry, spec in patterns),
            *(Outcome(Why.GLOBAL, entry, spec) for entry, spec in classes),
            Outcome(Why.GLOBAL, None, global_spec),
        )
        self.exclude_count = len(excludes)
        self.resolver = Resolver(self.entries, rules, mapped=mapped)
        self.rules = rules
        self._packed = dict(rules.packed_modules_mapping)
        self.default_class = min(self.resolver.class_hits(DEFAULT_CLASS), default=self.resolver.none)
        literals = (
            entry.target for entry in self.entries if entry.kind is PatternKind.LITERAL and EXPERTS in entry.target
        )
        self.literals: tuple[str, ...] = tuple(rules.to_module(each) if mapped else each for each in literals)
        self._leaves = _Leaves(rules, (*self.literals, *(below.literals if below else ())))
        self._distinct: dict[str, tuple[frozenset[int], ...]] = {}

    def is_plain(self, name: str) -> bool:
        """Tell whether `name` is neither fused nor a container: then one look-up decides."""
        leaf = name.rpartition(".")[2]
        return leaf != EXPERTS and leaf not in self._packed

    def first(self, name: str) -> int:
        """Return the index of the outcome of a plain module of the default class."""
        return min(self.resolver.first(name), self.default_class)

    def outcome(self, name: str, *, kind: str | None = None, class_name: str | None = None) -> Outcome:
        """Return what the entries say of a module.

        Args:
            name: the module's name.
            kind: `linear` or `moe` where the name does not tell.
            class_name: the module's class where it matters.

        Raises:
            ResolveError: shards or leaves disagree.
        """
        if not self.entries:
            return self.outcomes[-1]
        extra = self.resolver.class_hits(class_name or DEFAULT_CLASS)
        if kind == "moe":
            extra |= self.resolver.moe_hits()
        members = self.members(name)
        if not members:
            return self._least(self.resolver.hits(name) | extra)
        hits = self.member_hits(name, members)
        least = {each: self._least(each | extra) for each in dict.fromkeys(hits)}
        agreed = self._agreed(least.values())
        if agreed is None:
            raise ResolveError(_disagreement(name, members, [least[each] for each in hits]))
        return attrs.evolve(agreed, members=members)

    def _least(self, hits: frozenset[int]) -> Outcome:
        return self.outcomes[min(hits, default=self.resolver.none)]

    def members(self, name: str) -> tuple[str, ...]:
        """Return the shards of a fused module or the leaves of a container; () for any other module."""
        if is_container(name):
            return self._leaves.of(name)
        shards = self.rules.shards(name)
        if shards and self.rules.tensors is not None:
            present = tuple(shard for shard in shards if self._leaves.has_tensor(shard))
            return present or shards
        return shards

    def member_hits(self, name: str, members: Sequence[str]) -> list[frozenset[int]]:
        """Return the entries that cover each member of `name`."""
        if is_container(name):
            found = self.resolver.hits_many(members)
            # Thousands of experts, few different answers: those are remembered for `survey`.
            self._distinct[name] = tuple(dict.fromkeys(found))
            return found
        return self.resolver.fused_hits(name, members)

    def survey(
        self, name: str, *, kind: str | None = None, class_name: str | None = None
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return the entries that fit a module or one of its members, and those that decide one of them."""
        if not self.entries:
            return frozenset(), frozenset()
        extra = self.resolver.class_hits(class_name or DEFAULT_CLASS)
        if kind == "moe":
            extra |= self.resolver.moe_hits()
        own = self.resolver.hits(name)
        if extra:
            own |= extra
        members = self.members(name)
        if not members:
            return own, frozenset((min(own),)) if own else own
        distinct = self._distinct.get(name) or self.member_hits(name, members)
        each = [hits | extra for hits in distinct]
        return own.union(*each), frozenset(min(hits) for hits in each if hits)

    @staticmethod
    def _agreed(outcomes: Collection[Outcome]) -> Outcome | None:
        """Return the outcome that stands for all, or None if they differ in weight or activation."""
        if len({(outcome.spec.weight, outcome.spec.activation) for outcome in outcomes}) > 1:
            return None
        return min(outcomes, key=lambda outcome: _RANK[outcome.why])


def _disagreement(name: str, members: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    noun = "experts" if is_container(name) else "shards"
    groups: dict[str, list[str]] = defaultdict(list)
    for member, outcome in zip(members, outcomes, strict=True):
        by = f"{outcome.why} {outcome.entry.text!r} at {outcome.entry.path}" if outcome.entry else str(outcome.why)
        groups[f"{outcome.spec} ({by})"].append(member)
    said = []
    for text, group in groups.items():
        shown_names = ", ".join(group[:_SHOWN_MEMBERS])
        more = f" and {len(group) - _SHOWN_MEMBERS} more" if len(group) > _SHOWN_MEMBERS else ""
        said.append(f"{shown_names}{more} -> {text}")
    return f"{name}: its {noun} must have one format, but {'; '.join(said)}"


class _Leaves:
    """Leaves of expert containers: from the tensors, else from the counts, else from the configs' literals."""

    def __init__(self, rules: NameRules, literals: Iterable[str]) -> None:
        self._rules = rules
        self._literals = literals
        self._named: dict[str, tuple[str, ...]] | None = None
        self._stored: dict[str, tuple[str, ...]] | None = None
        self._with_tensors: set[str] | None = None

    def of(self, container: str) -> tuple[str, ...]:
        rules = self._rules
        if rules.tensors is not None:
            stored = self._from_tensors().get(container, ())
            if stored:
                return stored
        if rules.num_experts:
            return tuple(f"{container}.{n}.{leaf}" for n in range(rules.num_experts) for leaf in rules.expert_leaves)
        return self._from_literals().get(container, ())

    def _from_literals(self) -> dict[str, tuple[str, ...]]:
        if self._named is None:
            self._named = _below_containers(self._literals)
        return self._named

    def _from_tensors(self) -> dict[str, tuple[str, ...]]:
        if self._stored is None:
            owners = {tensor.rpartition(".")[0] for tensor in self._rules.tensors or () if EXPERTS in tensor}
            if self._rules.name_mapping:
                owners = {self._rules.to_module(owner) for owner in owners}
            self._stored = _below_containers(sorted(owners))
        return self._stored

    def has_tensor(self, module: str) -> bool:
        """Tell whether the checkpoint holds a tensor of the module."""
        if self._with_tensors is None:
            found: set[str] = set()
            for tensor in self._rules.tensors or ():
                owner = self._rules.to_module(tensor.rpartition(".")[0])
                while owner and owner not in found:
                    found.add(owner)
                    owner = owner.rpartition(".")[0]
            self._with_tensors = found
        return module in self._with_tensors


def _below_containers(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    below, start = f".{EXPERTS}.", f"{EXPERTS}."
    to_end = len(below) - 1
    for name in names:
        at = name.rfind(below)
        if at < 0:
            if name.startswith(start):
                found[EXPERTS][name] = None
        elif not name.endswith("."):
            found[name[: at + to_end]][name] = None
    return {container: tuple(leaves) for container, leaves in found.items()}
