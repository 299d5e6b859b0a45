"""One automaton for all globs and `re:` expressions of a config, built once, its states found as names come.

Nodes form a nondeterministic automaton over characters. Sets of nodes are interned and remember where each character
leads, so that the names of a model, which share nearly all their structure, cost a few dictionary look-ups each.
Time is linear in the name and the number of live nodes whatever the expression: nothing backtracks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from quant_spec.character_tests import Test, character_test
from quant_spec.errors import TooMuchWorkError
from quant_spec.globs import Wild, glob_tokens
from quant_spec.regex_tree import ONE_CHARACTER, Item, children, constants

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator

    from quant_spec.regexes import Regex

_Value = TypeVar("_Value")
_Table: TypeAlias = "dict[int, list[_Value]]"
_NO_MOVES: Final[dict[str, int]] = {}
_MAX_STATES: Final = 200_000
"""Interned sets of nodes; beyond it they are forgotten and found anew."""
_MAX_KEPT: Final = 100_000
"""Live nodes in all interned sets beyond what the automaton has itself, likewise."""


class NodeSet:
    """An interned set of live nodes, and where each character leads from it.

    Attributes:
        nodes: the live nodes, closed over empty moves.
        globs: entries whose glob ends here.
        regexes: entries whose expression has matched a prefix, or matches if the name ends here.
        step: character -> next set, filled as names come.
        moves, tests, loops: what the nodes do on a character (loops: on any), gathered when the set is first left.
        with_weight: entries whose glob ends here or after `.weight`, found when first asked for.
    """

    __slots__ = ("globs", "loops", "moves", "nodes", "regexes", "step", "tests", "with_weight")

    def __init__(self, nodes: frozenset[int], globs: frozenset[int], regexes: frozenset[int]) -> None:
        """Take the live nodes and the entries that end in them."""
        self.nodes = nodes
        self.globs = globs
        self.regexes = regexes
        self.step: dict[str, NodeSet] = {}
        self.moves: dict[str, list[int]] | None = None
        self.tests: tuple[tuple[Test, int], ...] = ()
        self.loops: tuple[int, ...] = ()
        self.with_weight: frozenset[int] | None = None


class Automaton:
    """Nodes and moves; `start` is the set before the first character."""

    def __init__(self) -> None:
        """Start with one node that accepts nothing.

        A node that leads on by one character, as nearly all do, costs a slot in two arrays; what few nodes have lies in
        tables by node.
        """
        self._character: list[str] = []
        self._next = array("q")
        self._branches: dict[int, dict[str, int]] = {}
        self._tests: _Table[tuple[Test, int]] = {}
        self._loops: set[int] = set()
        self._any: dict[int, int] = {}
        self._empty: _Table[int] = {}
        self._at_start: _Table[int] = {}
        self._at_end: _Table[int] = {}
        self._glob_ends: _Table[int] = {}
        self._regex_ends: _Table[int] = {}
        self._shared: dict[tuple[int, object], int] = {}
        self._closures: dict[int, frozenset[int]] = {}
        self._sets: dict[frozenset[int], NodeSet] = {}
        self._start: NodeSet | None = None
        self._kept = 0
        self._test_of: dict[int, Test] = {}
        self.forgotten = 0
        self._root = self._node()

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._character)

    def _node(self, *, loop: bool = False) -> int:
        node = len(self._character)
        self._character.append("")
        self._next.append(-1)
        if loop:
            self._loops.add(node)
        return node

    def _on(self, node: int, character: str) -> int:
        """Return the node that `character` leads to from `node`, a new one if there is none.

        Such a node is entered by that one move, so that whatever begins alike can share it.
        """
        if self._character[node] == character:
            return self._next[node]
        if not self._character[node]:
            self._character[node] = character
            target = self._next[node] = self._node()
            return target
        branches = self._branches.setdefault(node, {})
        if character not in branches:
            branches[character] = self._node()
        return branches[character]

    def _moves_of(self, node: int) -> Iterator[tuple[str, int]]:
        if self._character[node]:
            yield self._character[node], self._next[node]
            yield from self._branches.get(node, _NO_MOVES).items()

    # -- building ---------------------------------------------------------------------------------------------------

    def add_glob(self, text: str, entry: int) -> None:
        """Add a glob; it ends for `entry` where the whole text has been consumed."""
        node = self._root
        for token in glob_tokens(text):
            if isinstance(token, str):
                node = self._on(node, token)
                continue
            if token is Wild.ONE:
                following = self._any.get(node)
                node = self._any.setdefault(node, self._node()) if following is None else following
                continue
            key = (node, token)
            if key not in self._shared:
                self._shared[key] = self._glob_move(node, token)
            node = self._shared[key]
        _add(self._glob_ends, node, entry)

    def _glob_move(self, node: int, token: Wild | re.Pattern[str]) -> int:
        target = self._node(loop=isinstance(token, Wild))
        if isinstance(token, Wild):
            _add(self._empty, node, target)
        else:
            test: Test = token.match
            _add(self._tests, node, (test, target))
        return target

    def add_regex(self, regex: Regex, entry: int) -> None:
        """Add an expression that `regexes.py` found linear; a prefix that matches is enough, and stays matched."""
        self._test_of.clear()
        node = self._sequence(regex.items, self._root, share=True)
        key = (node, "matched")
        if key not in self._shared:
            self._shared[key] = self._node(loop=True)
            _add(self._empty, node, self._shared[key])
        _add(self._regex_ends, self._shared[key], entry)

    def _sequence(self, items: Iterable[Item], node: int, *, share: bool = False) -> int:
        for item in items:
            if not share:
                node = self._item(item, node)
                continue
            key = (node, ("regex", repr(item)))
            if key not in self._shared:
                self._shared[key] = self._item(item, node)
            node = self._shared[key]
        return node

    def _item(self, item: Item, node: int) -> int:
        operation, argument = item
        if operation is constants.LITERAL:
            target = self._on(node, chr(int(str(argument))))
        elif operation in ONE_CHARACTER:
            target = self._node()
            # An item in a counted repeat is met many times; the tree keeps it, and so its identity, meanwhile.
            test = self._test_of.get(id(item)) or self._test_of.setdefault(id(item), character_test(item))
            _add(self._tests, node, (test, target))
        elif operation is constants.AT:
            target = self._node()
            at_start = argument in {constants.AT_BEGINNING, constants.AT_BEGINNING_STRING}
            _add(self._at_start if at_start else self._at_end, node, target)
        else:
            assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
            target = self._compound(operation, argument, node)
        return target

    def _compound(self, operation: object, argument: tuple[object, ...], node: int) -> int:
        inner = argument[-1]
        if operation is constants.BRANCH:
            target = self._node()
            for branch in inner if isinstance(inner, list) else []:
                first = self._node()
                _add(self._empty, node, first)
                _add(self._empty, self._sequence(branch, first), target)
            return target
        (body,) = children(inner)
        if operation is constants.SUBPATTERN:
            return self._sequence(body, node)
        return self._repeat(int(str(argument[0])), argument[1], body, node)

    def _repeat(self, least: int, most: object, body: tuple[Item, ...], node: int) -> int:
        for _ in range(least):
            node = self._sequence(body, node)
        if most is constants.MAXREPEAT:
            if body == ((constants.ANY, None),):
                target = self._node(loop=True)
                _add(self._empty, node, target)
                return target
            again = self._node()
            _add(self._empty, node, again)
            _add(self._empty, self._sequence(body, again), again)
            target = self._node()
            _add(self._empty, again, target)
            return target
        target = self._node()
        _add(self._empty, node, target)
        for _ in range(int(str(most)) - least):
            node = self._sequence(body, node)
            _add(self._empty, node, target)
        return target

    @property
    def regex_entries(self) -> frozenset[int]:
        """Entries that were added as expressions."""
        return frozenset(entry for entries in self._regex_ends.values() for entry in entries)

    # -- running ----------------------------------------------------------------------------------------------------

    def _closure(self, nodes: Iterable[int], *conditional: _Table[int]) -> frozenset[int]:
        found = set(nodes)
        todo = list(found)
        while todo:
            node = todo.pop()
            for table in (self._empty, *conditional):
                for target in table.get(node, ()):
                    if target not in found:
                        found.add(target)
                        todo.append(target)
        return frozenset(found)

    def _intern(self, nodes: frozenset[int]) -> NodeSet:
        known = self._sets.get(nodes)
        if known is not None:
            return known
        if len(self._sets) >= _MAX_STATES or self._kept > _MAX_KEPT + len(self):
            self.forget()
        # An empty name is never asked for, so `^` counts at the start alone.
        at_end = self._closure(nodes, self._at_end) if not self._at_end.keys().isdisjoint(nodes) else nodes
        found = NodeSet(nodes, _entries(nodes, self._glob_ends), _entries(at_end, self._regex_ends))
        self._sets[nodes] = found
        self._kept += len(nodes)
        return found

    def forget(self) -> None:
        """Forget the sets found so far; those that others still hold stay right, but are found again as new ones."""
        self._sets.clear()
        self._closures.clear()
        self._start = None
        self._kept = 0
        self.forgotten += 1

    @property
    def start(self) -> NodeSet:
        """The set before the first character of a name."""
        if self._start is None:
            self._start = self._intern(self._closure({self._root}, self._at_start))
        return self._start

    def advance(self, state: NodeSet, text: str) -> NodeSet:
        """Return the set after the characters of `text`."""
        for character in text:
            known = state.step.get(character)
            if known is None:
                known = self._intern(self._moved(state, character))
                state.step[character] = known
            state = known
        return state

    def walked(self, state: NodeSet, text: str, most: int) -> tuple[NodeSet, int]:
        """Return the set after the characters of `text`, and how many nodes were live on the way, summed up.

        Raises:
            TooMuchWorkError: more than `most`, whatever of it was known before.
        """
        live = 0
        for character in text:
            state = state.step.get(character) or self.advance(state, character)
            live += len(state.nodes)
            if live > most:
                raise TooMuchWorkError
        return state, live

    def _moved(self, state: NodeSet, character: str) -> frozenset[int]:
        if state.moves is None:
            self._gather(state)
        assert state.moves is not None  # noqa: S101  (gathered above)
        targets = {*state.moves.get(character, ()), *state.loops}
        targets.update(target for test, target in state.tests if test(character))
        closures, empty = self._closures, self._empty
        moved = {target for target in targets if target not in empty}
        for target in targets - moved:
            closure = closures.get(target)
            if closure is None:
                closure = closures[target] = self._closure({target})
            moved |= closure
        return frozenset(moved)

    def _gather(self, state: NodeSet) -> None:
        moves: dict[str, list[int]] = {}
        for node in state.nodes:
            for character, target in self._moves_of(node):
                moves.setdefault(character, []).append(target)
        state.tests = tuple(test for node in state.nodes for test in self._tests.get(node, ()))
        following = (self._any[node] for node in state.nodes if node in self._any)
        state.loops = (*self._loops.intersection(state.nodes), *following)
        state.moves = moves

    def globs_of_module(self, state: NodeSet) -> frozenset[int]:
        """Return the entries whose glob matches the module that ends at `state`, or its `.weight`."""
        found = state.with_weight if self._glob_ends else state.globs
        if found is None:
            found = state.with_weight = state.globs | self.advance(state, ".weight").globs
        return found


def _add(table: _Table[_Value], node: int, value: _Value) -> None:
    table.setdefault(node, []).append(value)


def _entries(nodes: frozenset[int], ends: _Table[int]) -> frozenset[int]:
    return frozenset(entry for node in nodes if node in ends for entry in ends[node])
