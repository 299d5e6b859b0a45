r"""`re:` expressions, and why none of them can hang a server.

An expression made of characters, sets, groups, alternations, repeats, `^` and `$` is run by the automaton of
`automaton.py` in time linear in the name. The rest (look-around, `\\b`, back-references, inline flags, atomic groups)
needs Python's backtracking engine: it is accepted only without nested or neighbouring unbounded repeats, which bounds
its cost to the square of the name's length, and that length is bounded in turn.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import attrs

from quant_spec.errors import ConfigError, Defect, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

_SINCE_311: Final = sys.version_info >= (3, 11)
constants: Final = importlib.import_module("re._constants" if _SINCE_311 else "sre_constants")
"""Operations of the parse tree of `re`."""
parser: Final = importlib.import_module("re._parser" if _SINCE_311 else "sre_parse")
"""The parser of `re`, without its compiler."""

MAX_REGEX_LENGTH: Final = 10_000
"""Characters of an expression."""
MAX_REGEX_NODES: Final = 20_000
"""Automaton nodes of an expression, counted repeats written out."""
MAX_BACKTRACKING_NAME: Final = 2_000
"""Characters of a name that an expression with look-around is tried on."""
MAX_OPEN_REPEATS: Final = 2
"""Unbounded repeats of an expression that needs the backtracking engine."""

Item: TypeAlias = "tuple[object, object]"
"""One node of the parse tree of `re`: operation and argument."""

_REPEATS: Final = frozenset({constants.MAX_REPEAT, constants.MIN_REPEAT})
_ONE_CHARACTER: Final = frozenset({constants.LITERAL, constants.NOT_LITERAL, constants.ANY, constants.IN})
_ANCHORS: Final = frozenset(
    {constants.AT_BEGINNING, constants.AT_BEGINNING_STRING, constants.AT_END, constants.AT_END_STRING}
)


@attrs.frozen
class Regex:
    """A checked expression.

    Attributes:
        text: the expression without `re:`.
        items: its parse tree.
        linear: True if the automaton runs it, False if the backtracking engine must.
    """

    text: str
    items: tuple[Item, ...] = attrs.field(repr=False)
    linear: bool


def children(argument: object) -> Iterable[tuple[Item, ...]]:
    """Return the sequences of items inside the argument of an operation."""
    if isinstance(argument, parser.SubPattern):
        yield tuple(cast("Iterable[Item]", argument))
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from children(each)


def _is_linear(items: Iterable[Item]) -> bool:
    for operation, argument in items:
        if operation in _ONE_CHARACTER:
            continue
        if operation is constants.AT:
            if argument not in _ANCHORS:
                return False
        elif operation is constants.SUBPATTERN:
            assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
            if argument[1] or argument[2]:
                return False
        elif operation not in _REPEATS and operation is not constants.BRANCH:
            return False
        if not all(map(_is_linear, children(argument))):
            return False
    return True


def _nodes(items: Iterable[Item]) -> int:
    total = 0
    for operation, argument in items:
        inner = sum(map(_nodes, children(argument)))
        if operation in _REPEATS:
            assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
            least, most, _ = argument
            inner = (inner + 1) * (least + 1 if most is constants.MAXREPEAT else most)
        total += inner + 1
        if total > MAX_REGEX_NODES:
            return total
    return total


def _open_repeats(items: Iterable[Item], *, inside: bool = False) -> int:
    """Count unbounded repeats; one inside another repeat, or around an alternation, counts as too many."""
    total = 0
    for operation, argument in items:
        repeats = isinstance(argument, tuple) and len(argument) == 3 and _is_open(operation, argument)  # noqa: PLR2004
        if (repeats or operation is constants.BRANCH) and inside:
            return MAX_OPEN_REPEATS + 1
        nested = inside or operation in _REPEATS
        total += repeats + sum(_open_repeats(each, inside=nested) for each in children(argument))
    return total


def _is_open(operation: object, argument: tuple[object, ...]) -> bool:
    return operation in _REPEATS and (argument[1] is constants.MAXREPEAT or int(str(argument[1])) > 1)


@functools.lru_cache(maxsize=65_536)
def _parse(expression: str) -> Regex | str:
    """Return the checked expression, or what is wrong with it."""
    if not expression:
        return "empty regular expression: it would match every name"
    if len(expression) > MAX_REGEX_LENGTH:
        return f"regular expression of {len(expression)} characters; at most {MAX_REGEX_LENGTH} are accepted"
    try:
        tree = parser.parse(expression)
        return _checked(expression, tuple(tree), tree.state.flags & ~re.UNICODE.value)
    except (re.error, OverflowError) as error:
        return f"regular expression {shown(expression)} does not compile: {error}"
    except RecursionError:
        return f"regular expression {shown(expression)} is nested too deeply"


def _checked(expression: str, items: tuple[Item, ...], flags: int) -> Regex | str:
    if _nodes(items) > MAX_REGEX_NODES:
        return f"regular expression {shown(expression)} is too large with its counted repeats written out"
    if not flags and _is_linear(items):
        return Regex(expression, items, linear=True)
    re.compile(expression)
    if _open_repeats(items) > MAX_OPEN_REPEATS:
        return (
            f"regular expression {shown(expression)} needs backtracking (look-around, flags or back-references) and"
            f" could take too long: nested repeats, or more than {MAX_OPEN_REPEATS} repeats"
        )
    return Regex(expression, items, linear=False)


def parse_regex(expression: str, path: str = "$") -> Regex:
    """Return the checked expression (without `re:`).

    Raises:
        ConfigError: it does not compile, is too long, or could take more than quadratic time.
    """
    found = _parse(expression)
    if isinstance(found, str):
        raise ConfigError(Defect(path, found, f"re:{expression}"))
    return found


def check_regex(expression: str, path: str = "$") -> None:
    """Raise `ConfigError` unless `expression` compiles and runs in bounded time."""
    parse_regex(expression, path)
