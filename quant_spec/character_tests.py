"""Tests of one character: what `.`, `[…]`, `[^x]` or a character of an expression accepts, exactly as `re` has it."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final, TypeAlias

from quant_spec.regex_tree import Item, constants

if TYPE_CHECKING:
    from collections.abc import Callable

Test: TypeAlias = "Callable[[str], object]"
"""Takes one character; true if it is accepted."""

_CATEGORIES: Final = {
    constants.CATEGORY_DIGIT: r"\d",
    constants.CATEGORY_NOT_DIGIT: r"\D",
    constants.CATEGORY_SPACE: r"\s",
    constants.CATEGORY_NOT_SPACE: r"\S",
    constants.CATEGORY_WORD: r"\w",
    constants.CATEGORY_NOT_WORD: r"\W",
}
_CHANGING: Final = int(re.IGNORECASE | re.ASCII)


def any_character(_: str) -> bool:
    """Accept every character."""
    return True


def character_test(item: Item, flags: int = 0) -> Test:
    """Return the test of an item that stands for one character, under the flags of `re` that hold there."""
    operation, argument = item
    if operation is constants.ANY:
        return any_character
    if flags & _CHANGING:
        return _compiled(_text_of(item), flags & _CHANGING)
    if operation is constants.LITERAL:
        return chr(int(str(argument))).__eq__
    if operation is constants.NOT_LITERAL:
        return chr(int(str(argument))).__ne__
    return _set_test(argument)


def _set_test(members: object) -> Test:
    assert isinstance(members, list)  # noqa: S101  (shape of the parse tree)
    negated = False
    characters: set[str] = set()
    ranges: list[tuple[str, str]] = []
    categories: list[Test] = []
    for operation, value in members:
        if operation is constants.NEGATE:
            negated = True
        elif operation is constants.LITERAL:
            characters.add(chr(value))
        elif operation is constants.RANGE:
            ranges.append((chr(value[0]), chr(value[1])))
        else:
            categories.append(_compiled(_CATEGORIES[value], 0))

    def accepts(character: str) -> bool:
        found = (
            character in characters
            or any(low <= character <= high for low, high in ranges)
            or any(each(character) for each in categories)
        )
        return found is not negated

    return accepts


@functools.lru_cache(maxsize=1_024)
def _compiled(text: str, flags: int) -> Test:
    return re.compile(text, flags | re.DOTALL).match


def _text_of(item: Item) -> str:
    """Return the item written as an expression."""
    operation, argument = item
    if operation is constants.LITERAL:
        return re.escape(chr(int(str(argument))))
    if operation is constants.NOT_LITERAL:
        return f"[^{re.escape(chr(int(str(argument))))}]"
    assert isinstance(argument, list)  # noqa: S101  (shape of the parse tree)
    return f"[{''.join(_member(operation, value) for operation, value in argument)}]"


def _member(operation: object, value: object) -> str:
    if operation is constants.NEGATE:
        return "^"
    if operation is constants.LITERAL:
        return re.escape(chr(int(str(value))))
    if operation is constants.RANGE:
        assert isinstance(value, tuple)  # noqa: S101  (shape of the parse tree)
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    return _CATEGORIES[value]
