"""Resolver: which entries of a list cover a name, found once a path level and remembered.

All entries of a config stand in one order of precedence, so that the answer for a name is the least index that
covers it. Literals are dictionary look-ups on paths, globs and expressions one automaton; names share their parents,
so the cost of a name is that of its last segment. `Pattern.covers` states the same rules plainly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quant_spec.automaton import Automaton
from quant_spec.errors import ResolveError, TooMuchWorkError, shown
from quant_spec.patterns import EXPERTS, Pattern, PatternKind, Scope, containers
from quant_spec.regexes import parse_regex
from quant_spec.resolver_states import MAX_WORK, NONE, WEIGHT, Path, Position, Run, State, more_spent, united

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quant_spec.automaton import NodeSet
    from quant_spec.mapping import NameRules
    from quant_spec.regexes import Regex
    from quant_spec.special import SpecialExpressions

MAX_PATHS: Final = 100_000
"""Parent paths remembered; beyond it they are forgotten and found anew."""

MAX_PATH_LENGTH: Final = 512
"""Characters of a parent path that is remembered."""

_MAX_KEPT: Final = 200_000
"""Entries in all remembered states and paths; beyond it they are forgotten and found anew."""


class Resolver:
    """Entries in order of precedence, compiled once.

    Names are given whole; an index of `len(entries)` means that no entry covers the name.
    """

    def __init__(self, entries: Sequence[Pattern], rules: NameRules, *, mapped: bool) -> None:
        """Compile `entries`; `mapped` if they are written in checkpoint spelling and `rules` renames them."""
        self.none = len(entries)
        self._mapping = rules if mapped and rules.name_mapping else None
        self._subtrees: dict[str, list[int]] = {}
        self._exact: dict[str, list[int]] = {}
        self._runs: list[Run] = [Run()]
        self._automaton = Automaton()
        self._special: SpecialExpressions | None = None
        self._classes: dict[str, list[int]] = {}
        self._moe: list[int] = []
        patterned = any(entry.kind in {PatternKind.GLOB, PatternKind.REGEX} for entry in entries)
        self._written = _Written() if self._mapping and patterned else None
        for index, entry in enumerate(entries):
            self._add(index, entry)
        self._globs = frozenset(index for index, entry in enumerate(entries) if entry.kind is PatternKind.GLOB)
        self._states: dict[tuple[NodeSet, frozenset[int], frozenset[int], frozenset[int], int], State] = {}
        self._paths: dict[str, Path] = {}
        self._kept = 0
        self.forgotten = 0
        self._begin()

    # -- compiling --------------------------------------------------------------------------------------------------

    def _add(self, index: int, entry: Pattern) -> None:
        text = entry.target
        if not text:
            return
        if entry.kind is PatternKind.LITERAL:
            self._add_literal(index, text if self._mapping is None else self._mapping.to_module(text), entry.scope)
        elif entry.kind is PatternKind.CLASS:
            self._classes.setdefault(text, []).append(index)
        elif entry.kind is PatternKind.SLOT:
            self._moe.append(index)
            self._add_run(index, EXPERTS)
        elif entry.kind is PatternKind.GLOB:
            self._automaton.add_glob(text, index)
            if self._written:
                self._written.automaton.add_glob(text, index)
        else:
            regex = parse_regex(text, entry.path)
            if not regex.linear:
                self._add_special(index, regex)
                return
            self._automaton.add_regex(regex, index)
            if self._written:
                self._written.automaton.add_regex(regex, index)

    def _add_special(self, index: int, regex: Regex) -> None:
        from quant_spec.special import SpecialExpressions  # noqa: PLC0415  (few configs have such expressions)

        if self._special is None:
            self._special = SpecialExpressions()
        self._special.add(index, regex)

    def _add_literal(self, index: int, text: str, scope: Scope) -> None:
        if scope is Scope.EXACT:
            self._exact.setdefault(text, []).append(index)
        elif scope is Scope.SUBTREE and "." in text:
            self._subtrees.setdefault(text, []).append(index)
        else:
            self._add_run(index, text)

    def _add_run(self, index: int, text: str) -> None:
        node = 0
        for segment in text.split("."):
            following = self._runs[node].next
            if segment not in following:
                following[segment] = len(self._runs)
                self._runs.append(Run())
            node = following[segment]
        self._runs[node].ends.append(index)

    # -- states -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._root = State(self._automaton.start, frozenset({0}), NONE, NONE, 0, self.none)
        self._root.lead = ""
        self._automaton_forgotten = self._automaton.forgotten

    def _forget(self) -> None:
        """Forget states and paths; positions that others hold stay right, and they look at `forgotten`."""
        self._states.clear()
        self._paths.clear()
        self._automaton.forget()
        self._kept = 0
        self.forgotten += 1
        self._begin()

    def _edge(self, state: State, segment: str) -> State:
        """Return the state after one more segment (called once for each pair).

        Raises:
            ResolveError: the name takes more work than `MAX_WORK`.
        """
        automaton = self._automaton
        try:
            nodes, live = automaton.walked(state.nodes, f"{state.lead}{segment}", MAX_WORK)
        except TooMuchWorkError:
            self._forget()  # or the first set would keep all that were found on the way
            raise
        runs: set[int] = {0}
        ends: list[int] = []
        for run in state.runs:
            following = self._runs[run].next.get(segment)
            if following is not None:
                ends.extend(self._runs[following].ends)
                runs.add(following)
        below = united(state.below, ends, nodes.globs, nodes.regexes if segment == EXPERTS else ())
        hits = united(below, nodes.regexes, automaton.globs_of_module(nodes))
        fitting = (0 if below is state.below else len(below)) + (0 if hits is below else len(hits))
        spent = more_spent(state.spent, live + len(WEIGHT) * len(nodes.nodes) + 2 * fitting)
        key = (nodes, frozenset(runs), hits, below, spent)
        found = self._states.get(key)
        if found is None:
            self._kept += len(hits) + (0 if hits is below else len(below))
            if (
                len(self._states) >= MAX_PATHS
                or self._kept > _MAX_KEPT
                or automaton.forgotten > self._automaton_forgotten
            ):
                self._forget()
            found = self._states[key] = State(*key, self.none)
        if len(state.edges) < MAX_PATHS:
            state.edges[segment] = found
        return found

    def _path(self, path: str) -> Path:
        """Return the record of a parent path, "" being the root. Paths above it are recorded on the way."""
        missing: list[str] = []
        record = self._paths.get(path)
        while record is None and path:
            missing.append(path)
            path = path.rpartition(".")[0]
            record = self._paths.get(path)
        if record is None:
            record = Path(self._root, NONE, 0)
        for each in reversed(missing):
            record = self._below(record, each)
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            if len(each) <= MAX_PATH_LENGTH:
                self._paths[each] = record
        return record

    def _below(self, above: Path, path: str) -> Path:
        segment = path.rpartition(".")[2]
        state = above.state.edges.get(segment) or self._edge(above.state, segment)
        own = self._subtrees.get(path, [])
        if segment == EXPERTS:
            own = own + self._exact.get(path, [])
        literals = united(above.literals, own)
        if literals is above.literals:
            return Path(state, literals, above.spent)
        self._kept += len(literals)
        return Path(state, literals, more_spent(above.spent, 2 * len(literals)))

    # -- answers ----------------------------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """True if a position and a last segment decide: nothing needs backtracking, or is tried on other spellings."""
        return self._special is None and self._written is None

    @property
    def literal_names(self) -> dict[str, int]:
        """Names that a literal spells in full, with the least index of one: positions do not know them."""
        found = {name: indices[0] for name, indices in self._exact.items()}
        for name, indices in self._subtrees.items():
            found[name] = min(indices[0], found.get(name, self.none))
        return found

    @property
    def root(self) -> Position:
        """The position before the first segment."""
        return self._root, self.none

    def below(self, position: Position, path: str) -> Position:
        """Return the position of `path`, whose parent is at `position`."""
        state, first = position
        segment = path.rpartition(".")[2]
        own = self._subtrees.get(path)
        if own is not None and own[0] < first:
            first = own[0]
        if segment == EXPERTS:
            first = min((first, *self._exact.get(path, ())))
        return state.edges.get(segment) or self._edge(state, segment), first

    def leaf(self, position: Position, segment: str) -> int:
        """Return the least index of an entry that covers the module `segment` at `position`, literals apart."""
        state, first = position
        return min((state.edges.get(segment) or self._edge(state, segment)).first, first)

    def first(self, name: str) -> int:
        """Return the least index of an entry that covers `name`, or `none`."""
        return min(self.hits(name), default=self.none)

    def hits(self, name: str) -> frozenset[int]:
        """Return the indices of all entries that cover `name`.

        Raises:
            ResolveError: that takes too long for a name of this length.
        """
        try:
            return self._hits(name)
        except TooMuchWorkError as error:
            message = f"{shown(name)}: {error}"
            raise ResolveError(message) from None

    def _hits(self, name: str) -> frozenset[int]:
        parent, _, leaf = name.rpartition(".")
        record = self._path(parent)
        state = record.state.edges.get(leaf) or self._edge(record.state, leaf)
        found = state.hits
        if record.literals or name in self._subtrees or name in self._exact:
            found = found.union(record.literals, self._subtrees.get(name, ()), self._exact.get(name, ()))
        written = self._mapping.to_checkpoint(name) if self._mapping and self._written else ()
        if self._written:
            for each in written:
                found |= self._written.hits(each)
        if self._special:
            found |= self._special.hits((name, *containers(name), *written))
        return found

    def hits_many(self, names: Sequence[str]) -> list[frozenset[int]]:
        """Return `hits` of each name, in one pass.

        Raises:
            ResolveError: as `hits`.
        """
        if not self.is_plain:
            return [self.hits(name) for name in names]
        try:
            return self._hits_of(names)
        except TooMuchWorkError:
            return [self.hits(name) for name in names]  # raises again, with the name

    def _hits_of(self, names: Iterable[str]) -> list[frozenset[int]]:
        paths, edge, path = self._paths, self._edge, self._path
        subtrees, exact = self._subtrees, self._exact
        found: list[frozenset[int]] = []
        add = found.append
        for name in names:
            parent, _, leaf = name.rpartition(".")
            record = paths.get(parent) or path(parent)
            state = record.state.edges.get(leaf) or edge(record.state, leaf)
            hits = state.hits
            if record.literals or name in subtrees or name in exact:
                hits = hits.union(record.literals, subtrees.get(name, ()), exact.get(name, ()))
            add(hits)
        return found

    def class_hits(self, class_name: str | None) -> frozenset[int]:
        """Return the entries that name the class of a module."""
        return frozenset(self._classes.get(class_name or "", ()))

    def moe_hits(self) -> frozenset[int]:
        """Return the entries that stand for all fused experts."""
        return frozenset(self._moe)

    def fused_hits(self, name: str, shards: Sequence[str]) -> list[frozenset[int]]:
        """Return, for each shard, the entries that cover it.

        A literal that covers the fused name covers every shard; a glob or expression that covers it does so only if it
        fits none of the shards.
        """
        each = [self.hits(shard) for shard in shards]
        fused = self.hits(name)
        if not fused:
            return each
        anywhere: frozenset[int] = NONE.union(*each)
        patterns = self.pattern_entries
        direct = frozenset(index for index in fused if index not in patterns or index not in anywhere)
        return [hits | direct for hits in each]

    @property
    def pattern_entries(self) -> frozenset[int]:
        """Indices of globs and expressions."""
        special = self._special.entries if self._special else frozenset()
        return self._globs | special | self._automaton.regex_entries


class _Written:
    """Globs and expressions alone, for names in checkpoint spelling."""

    def __init__(self) -> None:
        self.automaton = Automaton()

    def hits(self, name: str) -> frozenset[int]:
        automaton = self.automaton
        state = automaton.start
        found: frozenset[int] = NONE
        spent = 0
        segments = name.split(".")
        for index, segment in enumerate(segments):
            state, live = automaton.walked(state, f".{segment}" if index else segment, MAX_WORK)
            found = united(found, state.globs)
            spent = more_spent(spent, live + 2 * len(found))
            if segment == EXPERTS:
                found |= state.regexes
        return found | state.regexes | automaton.globs_of_module(state)
