"""Strategies for globs and regular expressions: those that the automaton runs, and those that need more."""

from __future__ import annotations

import functools
from typing import Final

from hypothesis import strategies as st

_CHARACTERS: Final = "ab01_"
_LITERALS: Final = (*_CHARACTERS, r"\.", "layers", "proj")
_ONE_CHARACTER: Final = (".", r"\d", r"\w", r"\D", r"\W", r"\s", "[ab]", "[^a]", "[a-b0]", r"[\d_]", r"[^\w]", r"[.]")
_ANCHORS: Final = ("^", "$", r"\A", r"\Z")
_REPEATS: Final = ("*", "+", "?", "*?", "+?", "??", "{0,2}", "{1,}", "{2}", "{0}", "{1,3}?")
_NAMED: Final = "(?P<name>"
_AROUND: Final = ("(?=", "(?!", "(?i:", "(?s:", "(?a:", "(?-i:")
_FIXED_WIDTH: Final = ("a", "^", "ab", "[ab].", "(?:a|b)", r"\.", "a(?=b)", "(?<!a)b")
_NEEDS_BACKTRACKING: Final = (
    r"(?=a)",
    r"(?!b)",
    r"(?<=a)",
    r"(?<!0)",
    r"\b",
    r"\B",
    r"(a|b)(?:\1)",
    r"(?P<x>[ab])(?P=x)",
    r"(?i:A)",
    r"(a)?(?(1)b|0)",
)


@functools.lru_cache(maxsize=16)
def globs(alphabet: str = "ab.01") -> st.SearchStrategy[str]:
    """Return a strategy for globs: characters, `*`, `?`, `[..]`, `[!..]`, and brackets that never close."""
    pieces = st.sampled_from([*alphabet, "*", "?", "[ab]", "[!a]", "[0-1]", "[", "[]a]", "[!]b]", "**", "[a"])
    return st.lists(pieces, max_size=8).map("".join)


@functools.lru_cache(maxsize=16)
def linear_regexes(max_leaves: int = 8) -> st.SearchStrategy[str]:
    """Return a strategy for expressions (without `re:`) of characters, sets, groups, alternations, repeats, anchors."""
    atoms = st.sampled_from([*_LITERALS, *_ONE_CHARACTER])
    anchors = st.sampled_from(_ANCHORS)
    return st.recursive(atoms | anchors, lambda inner: _compound(inner, atoms), max_leaves=max_leaves).map(_one_name)


def _compound(inner: st.SearchStrategy[str], atoms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.tuples(st.sampled_from(["(", "(?:", _NAMED]), inner).map(_close)
    repeatable = atoms.filter(lambda text: len(text) == 1 or text[0] in "[\\") | groups
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.lists(inner, min_size=2, max_size=2).map("|".join),
        st.tuples(repeatable, st.sampled_from(_REPEATS)).map("".join),
        groups,
    )


def _close(parts: tuple[str, str]) -> str:
    opening, body = parts
    return f"{opening}{body})"


def _one_name(text: str) -> str:
    """Keep the first named group a named one: a name may be given once."""
    head, named, tail = text.partition(_NAMED)
    return head + named + tail.replace(_NAMED, "(")


@functools.lru_cache(maxsize=16)
def special_regexes(max_leaves: int = 6) -> st.SearchStrategy[str]:
    """Return a strategy for expressions that look around, ask for word bounds or change flags, inside anything."""
    special = st.tuples(st.sampled_from(_AROUND), linear_regexes(3)).map(_close)
    behind = st.tuples(st.sampled_from(["(?<=", "(?<!"]), st.sampled_from(_FIXED_WIDTH)).map(_close)
    bounds = st.sampled_from([r"\b", r"\B"])
    atoms = st.sampled_from([*_LITERALS, *_ONE_CHARACTER])
    body = st.recursive(
        st.one_of(atoms, special, behind, bounds), lambda inner: _compound(inner, atoms), max_leaves=max_leaves
    )
    flags = st.sampled_from(["", "", "", "(?i)", "(?a)", "(?s)", "(?ia)"])
    return st.tuples(flags, body).map("".join).map(_one_name)


def backtracking_regexes() -> st.SearchStrategy[str]:
    """Return a strategy for expressions that hold look-around, word bounds, back-references or inline flags."""
    pieces = st.sampled_from([*_LITERALS, ".", ".*", "[ab]", "a+", "$"])
    part = st.lists(pieces, max_size=3).map("".join)
    return st.tuples(part, st.sampled_from(_NEEDS_BACKTRACKING), part).map("".join)
