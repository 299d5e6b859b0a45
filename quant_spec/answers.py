"""Answers: the formats that a config has given out, and the short way to a new one.

Names share their parents. A parent path is looked at once and gets a row: the formats of the modules right below it, by
last segment. Paths from which nothing differs (the experts of a layer, the layers of a model) share one row, so that a
new name costs a split and a few dictionary look-ups. What depends on more than parent and last segment (fused modules,
containers of experts, names that an entry spells in full) has no place in a row and is asked for in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quant_spec.arguments import check_instance
from quant_spec.errors import ResolveError
from quant_spec.matching import LINE_BREAK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_spec.config import QuantizationConfig
    from quant_spec.layer_config import LayerQuantConfig
    from quant_spec.resolver_states import Position

MAX_REMEMBERED: Final = 200_000
"""Names whose format is remembered; beyond it they are forgotten and found anew."""
MAX_ROWS: Final = 100_000
"""Parent paths that are remembered, likewise."""
MAX_IN_ROW: Final = 10_000
"""Last segments that are remembered below one path, likewise."""
MAX_KEY: Final = 512
"""Characters of a path or segment that is remembered."""


class Row(dict[str, "LayerQuantConfig | None"]):
    """Formats of the modules right below a path, by last segment; None: to be asked for in full."""

    __slots__ = ("_rows", "positions")

    def __init__(self, rows: Rows, positions: tuple[Position, ...]) -> None:
        """Take what is known of the path: a position for the config itself and one for the checkpoint below it."""
        super().__init__()
        self._rows = rows
        self.positions = positions

    def __missing__(self, leaf: str) -> LayerQuantConfig | None:
        """Return the format of a module whose last segment is new here, and remember it."""
        found = self._rows.below(self.positions, leaf)
        if len(self) >= MAX_IN_ROW:
            self.clear()
        if len(leaf) <= MAX_KEY:
            self[leaf] = found
        return found


class Rows(dict[str, Row]):
    """Rows by parent path."""

    __slots__ = ("_config", "_forgotten", "_levels", "_root", "_shared", "_spelled", "_unknown", "literals")

    def __init__(self, config: QuantizationConfig) -> None:
        """Start empty for `config`.

        Attributes:
            literals: names that an entry spells in full: no row knows them.
        """
        super().__init__()
        self._config = config
        levels = [config]
        if config.source is not None and config.source.matcher.entries:
            levels.append(config.source)
        resolvers = [level.matcher.resolver for level in levels]
        self._levels = resolvers if all(each.is_plain for each in resolvers) else []
        self._spelled = [each.literal_names for each in self._levels]
        self.literals = frozenset().union(*self._spelled)
        self._root = tuple(each.root for each in self._levels)
        self._forgotten = 0
        self._unknown = Row(self, ())
        self._shared: dict[tuple[Position, ...], Row] = {}

    def __missing__(self, path: str) -> Row:
        """Return the row of a path that is new."""
        if not self._levels or path[:1] in {"", "."} or len(path) > MAX_KEY or LINE_BREAK in path:
            return self._unknown
        missing = [path]
        above = path.rpartition(".")[0]
        while above and above not in self:
            missing.append(above)
            above = above.rpartition(".")[0]
        positions = self[above].positions if above else self._root
        row = self._unknown
        for each in reversed(missing):
            try:
                positions = self._below(positions, each)
            except ResolveError:
                self._forget()
                return self._unknown  # raised again, with the whole name, where it is asked for in full
            found = self._shared.get(positions)
            row = self._row(positions) if found is None else found
            if len(self) >= MAX_ROWS:
                self.clear()
            self[each] = row
        return row

    def _forget(self) -> None:
        """Forget the positions that a resolver has forgotten, as it keeps all that leads on from them alive."""
        self._forgotten = sum(each.forgotten for each in self._levels)
        self._root = tuple(each.root for each in self._levels)
        self._shared.clear()
        self.clear()

    def _below(self, positions: tuple[Position, ...], path: str) -> tuple[Position, ...]:
        if len(positions) == 1:  # a config without one below it, the usual case
            return (self._levels[0].below(positions[0], path),)
        return tuple(level.below(position, path) for level, position in zip(self._levels, positions, strict=True))

    def _row(self, positions: tuple[Position, ...]) -> Row:
        if self._forgotten != sum(each.forgotten for each in self._levels):
            self._forget()
        if len(self._shared) >= MAX_ROWS:
            self._shared.clear()
        found = self._shared[positions] = Row(self, positions)
        return found

    def _firsts(self, positions: tuple[Position, ...], leaf: str, name: str) -> tuple[int, int | None]:
        """Return the least indices of entries that cover a module, in the config and in the checkpoint's below it."""
        found = self._levels[0].leaf(positions[0], leaf)
        if name:
            found = min(found, self._spelled[0].get(name, found))
        if len(positions) == 1:
            return found, None
        below = self._levels[1].leaf(positions[1], leaf)
        return found, min(below, self._spelled[1].get(name, below))

    def below(self, positions: tuple[Position, ...], leaf: str, name: str = "") -> LayerQuantConfig | None:
        """Return the format of `leaf` below the path at `positions`, or None if more than these decides.

        Args:
            positions: those of the parent's row.
            leaf: the last segment.
            name: the whole name where an entry spells it in full.
        """
        matcher = self._config.matcher
        if not positions or len(leaf) > MAX_KEY or not matcher.is_plain(leaf) or LINE_BREAK in leaf:
            return None
        try:
            first, below = self._firsts(positions, leaf, name)
            return self._config.plain_format(first, below)
        except ResolveError:
            return None  # raised again, with the whole name, where it is asked for in full


class Answers(dict[str, "LayerQuantConfig"]):
    """Formats by name. A name seen before costs one dictionary look-up and no Python code."""

    __slots__ = ("_config", "_literals", "_rows")

    def __init__(self, config: QuantizationConfig) -> None:
        """Start empty for `config`."""
        super().__init__()
        self._config = config
        self._rows = Rows(config)
        self._literals = self._rows.literals

    def __missing__(self, name: str) -> LayerQuantConfig:
        """Return the format of a name that is new, and remember it.

        Raises:
            ResolveError: the name is none that a module can have, or its shards or experts disagree.
        """
        if type(name) is not str:
            check_instance("prefix", name, str)
        parent, _, leaf = name.rpartition(".")
        row = self._rows[parent]
        found = row[leaf]
        if name in self._literals:
            found = self._rows.below(row.positions, leaf, name)
        if found is None:
            found = self._config.resolve_afresh(name)
        if len(name) <= MAX_KEY:
            if len(self) >= MAX_REMEMBERED:
                self.clear()
            self[name] = found
        return found

    def of_many(self, names: Iterable[str]) -> dict[str, LayerQuantConfig]:
        """Return the formats of `names`, without remembering each.

        Raises:
            ResolveError: as `__missing__`, for the first name that has no answer.
        """
        rows, literals, afresh = self._rows, self._literals, self._config.resolve_afresh
        found: dict[str, LayerQuantConfig] = {}
        for index, name in enumerate(names):
            if type(name) is not str:
                check_instance(f"names[{index}]", name, str)
            parent, _, leaf = name.rpartition(".")
            row = rows[parent]
            answer = row[leaf]
            if name in literals:
                answer = rows.below(row.positions, leaf, name)
            if answer is None:
                answer = afresh(name)
            found[name] = answer
        return found
