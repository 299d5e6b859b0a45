"""What a resolver remembers of parent paths, and the count of what one name costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from quant_spec.errors import TooMuchWorkError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_spec.automaton import NodeSet

MAX_WORK: Final = 400_000
"""Live nodes over the characters of one name, and twice the entries over its segments: what one name may cost."""

UNIT: Final = 512
"""Work is counted in whole units a segment: the segments of ordinary names cost none."""

WEIGHT: Final = ".weight"
"""Tried after each name, so that a glob over tensors covers their module."""

NONE: Final[frozenset[int]] = frozenset()
"""No entry."""


class State:
    """What is known after some segments of a name, whatever they were.

    Attributes:
        hits: entries that cover the module which ends here (literals of whole names apart).
        first: the least of them.
        below: entries that cover everything below.
        spent: units of work that this name has taken so far.
        edges: next segment -> next state.
        lead: what stands between what has been read and the next segment.
    """

    __slots__ = ("below", "edges", "first", "hits", "lead", "nodes", "runs", "spent")

    def __init__(
        self, nodes: NodeSet, runs: frozenset[int], hits: frozenset[int], below: frozenset[int], spent: int, none: int
    ) -> None:
        """Take the automaton's state, the live runs of segments, and the entries; `none` stands for no entry."""
        self.spent = spent
        self.nodes = nodes
        self.runs = runs
        self.hits = hits
        self.below = below
        self.first = min(hits, default=none)
        self.edges: dict[str, State] = {}
        self.lead = "."


Position: TypeAlias = "tuple[State, int]"
"""A parent path: its state, and the least index of a literal that covers everything below it."""


class Path:
    """A parent path: its state, the literals that cover what lies below it, and the units of work that they took."""

    __slots__ = ("literals", "spent", "state")

    def __init__(self, state: State, literals: frozenset[int], spent: int) -> None:
        """Take the three."""
        self.state = state
        self.literals = literals
        self.spent = spent


def more_spent(before: int, work: int) -> int:
    """Return the units of work that a name has taken, after a segment that took `work`.

    Raises:
        TooMuchWorkError: more than `MAX_WORK`.
    """
    spent = before + work // UNIT
    if spent * UNIT > MAX_WORK:
        raise TooMuchWorkError
    return spent


def united(known: frozenset[int], *more: Iterable[int]) -> frozenset[int]:
    """Return the union: the same object where nothing is new, since entries may be a hundred thousand."""
    if not any(more):
        return known
    found = known.union(*more)
    return known if len(found) == len(known) else found


class Run:
    """A node of the tree of segment runs (`a.b` anywhere in a name)."""

    __slots__ = ("ends", "next")

    def __init__(self) -> None:
        """Start as a leaf where no run ends."""
        self.next: dict[str, int] = {}
        self.ends: list[int] = []
