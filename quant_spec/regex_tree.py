"""The parse tree that `re` itself makes of an expression, and what can be read off it without running it.

Two bounds matter: how large the tree is with its counted repeats written out, and how many steps a backtracking engine
can take on a name of a given length. Both are upper bounds, found in time linear in the tree.
"""

from __future__ import annotations

import enum
import importlib
import sys
from typing import TYPE_CHECKING, Final, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

_SINCE_311: Final = sys.version_info >= (3, 11)
constants: Final = importlib.import_module("re._constants" if _SINCE_311 else "sre_constants")
"""Operations of the parse tree of `re`."""
parser: Final = importlib.import_module("re._parser" if _SINCE_311 else "sre_parse")
"""The parser of `re`, without its compiler."""

Item: TypeAlias = "tuple[object, object]"
"""One node of the parse tree of `re`: operation and argument."""

MANY_STEPS: Final = 10**15
"""Where the bound on the steps of a backtracking engine stops being counted."""

REPEATS: Final = frozenset({constants.MAX_REPEAT, constants.MIN_REPEAT})
ONE_CHARACTER: Final = frozenset({constants.LITERAL, constants.NOT_LITERAL, constants.ANY, constants.IN})
ANCHORS: Final = frozenset(
    {constants.AT_BEGINNING, constants.AT_BEGINNING_STRING, constants.AT_END, constants.AT_END_STRING}
)
LOOKS: Final = frozenset({constants.ASSERT, constants.ASSERT_NOT})
_NEVER: Final = constants.FAILURE
_POSSESSIVE: Final = getattr(constants, "POSSESSIVE_REPEAT", None)
_ATOMIC: Final = getattr(constants, "ATOMIC_GROUP", None)
_AHEAD: Final = 1


class Kind(enum.IntEnum):
    r"""What an expression needs, the least first.

    AUTOMATON: characters, sets, groups, alternations, repeats, `^` and `$`: runs in the one automaton of a config.
    POSITIONS: also look-around, `\b` and flags: `positions.py` runs it.
    BACKTRACKING: back-references, conditions, atomic groups: only `re` itself can run it.
    """

    AUTOMATON = 0
    POSITIONS = 1
    BACKTRACKING = 2


def children(argument: object) -> Iterable[tuple[Item, ...]]:
    """Return the sequences of items inside the argument of an operation."""
    if isinstance(argument, parser.SubPattern):
        yield tuple(cast("Iterable[Item]", argument))
    elif isinstance(argument, (list, tuple)):
        for each in argument:
            yield from children(each)


def inside(item: Item) -> list[tuple[Item, ...]]:
    """Return the sequences of items inside an item; none for one that stands for a character or a place."""
    operation, argument = item
    return [] if operation in ONE_CHARACTER or operation is constants.AT else list(children(argument))


def repeat_of(item: Item) -> tuple[int, int | None, tuple[Item, ...]] | None:
    """Return least count, greatest count (None: unbounded) and body of a repeat; None for any other item."""
    operation, argument = item
    if operation not in REPEATS and (operation is not _POSSESSIVE or _POSSESSIVE is None):
        return None
    assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
    least, most, body = argument
    return int(str(least)), None if most is constants.MAXREPEAT else int(str(most)), tuple(body)


def nesting(items: Iterable[Item], most: int) -> int:
    """Return how deep groups, repeats and alternations lie inside each other; counting stops beyond `most`."""
    if most < 0:
        return 0
    return max((1 + nesting(each, most - 1) for item in items for each in inside(item)), default=0)


def written_out(items: Iterable[Item], most: int) -> int:
    """Return the number of nodes with counted repeats written out; counting stops beyond `most`."""
    total = 0
    for item in items:
        nodes = sum(written_out(each, most) for each in inside(item))
        repeat = repeat_of(item)
        if repeat is not None:
            nodes = max(nodes, 1) * (repeat[0] + 1 if repeat[1] is None else repeat[1])
        total += nodes + 1
        if total > most:
            return total
    return total


def kind_of(items: Iterable[Item]) -> Kind:
    """Return what a sequence needs."""
    return max(map(_kind, items), default=Kind.AUTOMATON)


def _kind(item: Item) -> Kind:
    operation, argument = item
    if operation in ONE_CHARACTER:
        return Kind.AUTOMATON
    if operation is constants.AT:
        return Kind.AUTOMATON if argument in ANCHORS else Kind.POSITIONS
    if operation in LOOKS or operation is _NEVER:
        own = Kind.POSITIONS
    elif operation is constants.SUBPATTERN:
        assert isinstance(argument, tuple)  # noqa: S101  (shape of the parse tree)
        own = Kind.POSITIONS if argument[1] or argument[2] else Kind.AUTOMATON
    else:
        plain = operation in REPEATS or operation is constants.BRANCH
        own = Kind.AUTOMATON if plain else Kind.BACKTRACKING
    return max([own, *map(kind_of, inside(item))])


def flags_within(items: Iterable[Item]) -> int:
    """Return the flags that any group inside turns on."""
    found = 0
    for item in items:
        operation, argument = item
        if operation is constants.SUBPATTERN and isinstance(argument, tuple):
            found |= int(argument[1])
        for each in inside(item):
            found |= flags_within(each)
    return found


def widest_range(items: Iterable[Item]) -> int:
    """Return the characters of the widest range in a set."""
    found = 0
    for item in items:
        operation, argument = item
        if operation is constants.IN and isinstance(argument, list):
            ends = [value for kind, value in argument if kind is constants.RANGE]
            found = max([found, *(high - low + 1 for low, high in ends)])
        found = max([found, *map(widest_range, inside(item))])
    return found


def has_open_look_behind(items: Iterable[Item]) -> bool:
    """Tell whether a look-behind has no fixed width: `re` parses it and refuses to compile it."""
    for item in items:
        operation, argument = item
        if operation in LOOKS and isinstance(argument, tuple) and argument[0] != _AHEAD:
            least, most = argument[1].getwidth()
            if least != most:
                return True
        if any(map(has_open_look_behind, inside(item))):
            return True
    return False


def most_steps(items: tuple[Item, ...], length: int) -> int:
    """Return a bound on the steps of a backtracking engine that matches at the start of a name of `length` characters.

    Repeats at the end that may stop at once are left out of the product: whatever they take, the match stands.
    """
    end = len(items)
    while end and (repeat := repeat_of(items[end - 1])) is not None and repeat[0] == 0:
        end -= 1
    return min(_sequence_steps(items[:end], length)[1] + length, MANY_STEPS)


def _sequence_steps(items: Iterable[Item], length: int) -> tuple[int, int]:
    """Return bounds on the ways in which a sequence matches from one place, and on the steps to try them all.

    Each way through what stands before an item tries the item anew: ways multiply, steps add up weighted by them.
    """
    ways, steps = 1, 1
    for item in items:
        item_ways, item_steps = _item_steps(item, length)
        steps = min(steps + ways * item_steps, MANY_STEPS)
        ways = min(ways * item_ways, MANY_STEPS)
    return ways, steps


def _item_steps(item: Item, length: int) -> tuple[int, int]:
    operation, _ = item
    repeat = repeat_of(item)
    if repeat is not None:
        ways, steps = _repeat_steps(*repeat, length)
        return (1 if operation is _POSSESSIVE else ways), steps
    parts = [_sequence_steps(each, length) for each in inside(item)]
    steps = 1 + sum(each for _, each in parts)
    if operation in {constants.GROUPREF, constants.GROUPREF_EXISTS}:
        steps += length
    ways = sum(each for each, _ in parts) or 1
    if operation in LOOKS or operation is _ATOMIC:
        ways = 1
    elif operation is constants.GROUPREF_EXISTS:
        ways += 1  # the branch that is not written matches nothing
    return min(ways, MANY_STEPS), min(steps, MANY_STEPS)


def _repeat_steps(least: int, most: int | None, body: tuple[Item, ...], length: int) -> tuple[int, int]:
    """Return the bounds of a repeat; an iteration that takes no character is the last one."""
    longest = least + length + 1
    rounds = longest if most is None else min(most, longest)
    body_ways, body_steps = _sequence_steps(body, length)
    if body_ways == 1:
        return rounds - min(least, rounds) + 1, min((rounds + 1) * body_steps, MANY_STEPS)
    total = reached = 1
    for _ in range(rounds):
        reached = min(reached * body_ways, MANY_STEPS)
        total = min(total + reached, MANY_STEPS)
        if total == MANY_STEPS:
            break
    return total, min(total * body_steps, MANY_STEPS)
