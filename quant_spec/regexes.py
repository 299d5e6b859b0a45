r"""`re:` expressions, and why none of them can hang a server.

An expression made of characters, sets, groups, alternations, repeats, `^` and `$` is run by the automaton of
`automaton.py` in time linear in the name. Look-around, `\\b` and flags are run by `re` while its steps are bounded by
what is allowed for one name, and by `positions.py`, which never backtracks, where they are not. Back-references,
conditions and atomic groups can only be run by `re`: they are accepted if their steps are bounded, on names of bounded
length.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from quant_spec.account import EXPRESSION_CHARACTERS, current_account
from quant_spec.arguments import check_instance
from quant_spec.errors import ConfigError, Defect, shown
from quant_spec.regex_tree import (
    Item,
    Kind,
    flags_within,
    has_open_look_behind,
    kind_of,
    most_steps,
    nesting,
    parser,
    widest_range,
    written_out,
)

MAX_REGEX_LENGTH: Final = 10_000
"""Characters of an expression."""
MAX_REGEX_NODES: Final = 4_000
"""Nodes of an expression, counted repeats written out."""
MAX_REGEX_DEPTH: Final = 40
"""Groups, repeats and alternations inside each other."""
MAX_BACKTRACKING_NAME: Final = 512
"""Characters of a name that an expression is tried on which only `re` can run."""
MAX_BACKTRACKING_STEPS: Final = 4_000_000
"""Steps of `re` on a name of that length, and of all expressions together that `re` runs on one name."""
MAX_FOLDED_RANGE: Final = 512
"""Characters of a range in a set where case is ignored: `re` writes such a range out."""
MAX_REMEMBERED: Final = 500_000
"""Characters of expressions whose parse trees are remembered; beyond it they are forgotten and made anew."""


@attrs.frozen
class Regex:
    """A checked expression.

    Attributes:
        text: the expression without `re:`.
        items: its parse tree.
        kind: what can run it.
        flags: the flags of `re` that it turns on for the whole of it.
    """

    text: str
    items: tuple[Item, ...] = attrs.field(repr=False)
    kind: Kind
    flags: int = 0

    @property
    def linear(self) -> bool:
        """True if the automaton runs it."""
        return self.kind is Kind.AUTOMATON


class _Parsed:
    """Expressions that were parsed, or what is wrong with them, as far as their characters go."""

    def __init__(self) -> None:
        self._known: dict[str, Regex | str] = {}
        self._characters = 0

    def __call__(self, expression: str) -> Regex | str:
        found = self._known.get(expression)
        if found is None:
            found = _parse(expression)
            if self._characters > MAX_REMEMBERED:
                self._known.clear()
                self._characters = 0
            self._known[expression] = found
            self._characters += len(expression) + EXPRESSION_CHARACTERS
        return found


_parsed: Final = _Parsed()


def _parse(expression: str) -> Regex | str:
    """Return the checked expression, or what is wrong with it."""
    try:
        tree = parser.parse(expression)
        return _checked(expression, tuple(tree), tree.state.flags & ~re.UNICODE.value)
    except (re.error, OverflowError, ValueError) as error:
        return f"regular expression {shown(expression)} does not compile: {error}"
    except RecursionError:
        return f"regular expression {shown(expression)} is nested too deeply"


def _checked(expression: str, items: tuple[Item, ...], flags: int) -> Regex | str:
    named = f"regular expression {shown(expression)}"
    if nesting(items, MAX_REGEX_DEPTH) > MAX_REGEX_DEPTH:
        return f"{named} is nested too deeply: more than {MAX_REGEX_DEPTH} groups, repeats and alternations"
    if written_out(items, MAX_REGEX_NODES) > MAX_REGEX_NODES:
        return f"{named} is too large: more than {MAX_REGEX_NODES} nodes with its counted repeats written out"
    if has_open_look_behind(items):
        return f"{named} does not compile: look-behind requires fixed-width pattern"
    kind = max(kind_of(items), Kind.POSITIONS if flags else Kind.AUTOMATON)
    if (flags | flags_within(items)) & re.IGNORECASE and widest_range(items) > MAX_FOLDED_RANGE:
        return f"{named} ignores case and has a range of more than {MAX_FOLDED_RANGE} characters"
    if kind is Kind.BACKTRACKING:
        if most_steps(items, MAX_BACKTRACKING_NAME) > MAX_BACKTRACKING_STEPS:
            return (
                f"{named} needs backtracking (back-references, conditions or atomic groups) and could take too long:"
                f" more than {MAX_BACKTRACKING_STEPS} steps on a name of {MAX_BACKTRACKING_NAME} characters"
            )
        re.compile(expression)
    return Regex(expression, items, kind, flags)


def parse_regex(expression: str, path: str = "$") -> Regex:
    """Return the checked expression (without `re:`).

    Raises:
        ConfigError: it does not compile, is too long or too large, could take too long, or is one too many for the
            document that is being parsed.
        ArgumentError: it is no string.
    """
    check_instance("expression", expression, str)
    account = current_account()
    problem = _unparsed(expression)
    if problem is None and account is not None:
        account.expression(expression, path)
    found = problem or _parsed(expression)
    if isinstance(found, str):
        raise ConfigError(Defect(path, found, f"re:{expression}"))
    if account is not None and found.kind is not Kind.AUTOMATON:
        account.special(expression, path)
    return found


def _unparsed(expression: str) -> str | None:
    """Return what is wrong with an expression that must not even be parsed; None: nothing."""
    if not expression:
        return "empty regular expression: it would match every name"
    if len(expression) > MAX_REGEX_LENGTH:
        return f"regular expression of {len(expression)} characters; at most {MAX_REGEX_LENGTH} are accepted"
    return None


def check_regex(expression: str, path: str = "$") -> None:
    """Raise `ConfigError` unless `expression` compiles and runs in bounded time."""
    parse_regex(expression, path)
