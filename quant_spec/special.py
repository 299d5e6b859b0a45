"""The `re:` expressions of a config that its automaton cannot run: look-around, word bounds, flags, back-references."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quant_spec.errors import ResolveError, TooMuchWorkError, shown
from quant_spec.positions import Positions, Work
from quant_spec.regex_tree import Kind, most_steps
from quant_spec.regexes import MAX_BACKTRACKING_NAME, MAX_BACKTRACKING_STEPS, Regex

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Expression:
    """One expression: compiled when `re` first runs it, with the bounds on its steps by length of name."""

    __slots__ = ("_bounds", "_compiled", "index", "regex")

    def __init__(self, index: int, regex: Regex) -> None:
        self.index = index
        self.regex = regex
        self._bounds: dict[int, int] = {}
        self._compiled: re.Pattern[str] | None = None

    def most_steps(self, length: int) -> int:
        found = self._bounds.get(length)
        if found is None:
            found = self._bounds[length] = most_steps(self.regex.items, length)
        return found

    def match(self, name: str) -> bool:
        if self._compiled is None:
            self._compiled = re.compile(self.regex.text)
        return self._compiled.match(name) is not None


class SpecialExpressions:
    """Runs each expression with `re` while the bounds on its steps allow it, else without backtracking."""

    def __init__(self) -> None:
        """Start without expressions."""
        self._expressions: list[_Expression] = []

    def __len__(self) -> int:
        """Return the number of expressions."""
        return len(self._expressions)

    def add(self, index: int, regex: Regex) -> None:
        """Add the expression of the entry `index`."""
        self._expressions.append(_Expression(index, regex))

    @property
    def entries(self) -> frozenset[int]:
        """Indices of the entries."""
        return frozenset(each.index for each in self._expressions)

    def hits(self, names: Iterable[str]) -> frozenset[int]:
        """Return the entries whose expression matches at the start of one of `names`.

        Raises:
            ResolveError: that takes more than is allowed for one module, whatever the names were before.
        """
        found: set[int] = set()
        steps, work = MAX_BACKTRACKING_STEPS, Work()
        for name in names:
            positions: Positions | None = None
            for each in self._expressions:
                bound = each.most_steps(len(name))
                if bound <= steps and (each.regex.kind is Kind.POSITIONS or len(name) <= MAX_BACKTRACKING_NAME):
                    steps -= bound
                    matched = each.match(name)
                elif each.regex.kind is Kind.POSITIONS:
                    try:
                        positions = positions or Positions(name, work)
                        matched = positions.match(each.regex.items, each.regex.flags)
                    except TooMuchWorkError:
                        raise _too_much(name) from None
                else:
                    raise _too_much(name)
                if matched:
                    found.add(each.index)
        return frozenset(found)


def _too_much(name: str) -> ResolveError:
    return ResolveError(
        f"{shown(name)}: {len(name)} characters are too long for this config's expressions with look-around, flags or"
        f" back-references; back-references are tried on at most {MAX_BACKTRACKING_NAME}"
    )
