"""Globs over dotted module names: `*` (dots too), `?`, `[...]`, `[!...]`; case-sensitive, over the whole string."""

from __future__ import annotations

import enum
import fnmatch
import functools
import re
from typing import Final, TypeAlias


class Wild(enum.Enum):
    """The two wildcards without a set."""

    ONE = "?"
    MANY = "*"


@functools.lru_cache(maxsize=4_096)
def compile_glob(text: str) -> re.Pattern[str]:
    """Return the regular expression of a glob. Compiled once: `fnmatch` itself remembers 256 on Python 3.10."""
    return re.compile(fnmatch.translate(text))


MAX_BRACKET: Final = 1_000
"""Characters of one `[...]`; `fnmatch` takes time quadratic in them."""

GlobToken: TypeAlias = "str | Wild | re.Pattern[str]"
"""A character, a wildcard, or the expression of one `[...]`."""


def _bracket_end(text: str, start: int, last: int) -> int:
    """Return the index of the `]` that closes the `[` at `start`, or -1: `fnmatch`'s rule; `last`: of the last `]`."""
    if start >= last:
        return -1
    index = start + 1
    if text[index : index + 1] == "!":
        index += 1
    if text[index : index + 1] == "]":
        index += 1
    return text.find("]", index)


def glob_tokens(text: str) -> list[GlobToken]:
    """Return the glob as tokens that each take one character, and `Wild.MANY` for runs of `*`.

    >>> glob_tokens("a*?")
    ['a', <Wild.MANY: '*'>, <Wild.ONE: '?'>]
    """
    tokens: list[GlobToken] = []
    last = text.rfind("]")
    index = 0
    while index < len(text):
        character = text[index]
        end = _bracket_end(text, index, last) if character == "[" else -1
        if end >= 0:
            tokens.append(compile_glob(text[index : end + 1]))
            index = end
        elif character == "*":
            if not tokens or tokens[-1] is not Wild.MANY:
                tokens.append(Wild.MANY)
        else:
            tokens.append(Wild.ONE if character == "?" else character)
        index += 1
    return tokens


def longest_bracket(text: str) -> int:
    """Return the characters of the longest `[...]` of a glob."""
    longest = index = 0
    last = text.rfind("]")
    while (index := text.find("[", index)) >= 0:
        end = _bracket_end(text, index, last)
        longest = max(longest, end + 1 - index)
        index = max(end, index) + 1
    return longest
