"""How published resolvers go about a name, restated plainly: what each looks at, in which order, and what it compiles.

None remembers an answer, so cold and warm are the same for all of them. Each takes entries in its own syntax: a peer
without globs gets them as `re:` expressions.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Ask: TypeAlias = "Callable[[str], str | None]"


@attrs.frozen
class Entries:
    """A config for the benchmark: what is excluded, and formats by pattern, as our own documents write them."""

    excludes: tuple[str, ...]
    patterns: tuple[tuple[str, str], ...]
    default: str | None = "ptpc_fp8"

    def as_request(self) -> dict[str, object]:
        """Return the same config as a request of this library."""
        return {
            "global_quant_config": self.default,
            "layer_quant_config": dict(self.patterns),
            "exclude_layer": list(self.excludes),
        }


def is_glob(text: str) -> bool:
    return not set("*?[").isdisjoint(text)


def as_expression(text: str) -> str:
    """Return an entry as the expression that a peer without globs would be given."""
    if text.startswith("re:"):
        return text
    return "re:" + fnmatch.translate(text) if is_glob(text) else text


def atom(entries: Entries) -> Ask:
    """Walk the excludes (literal and below, glob twice, `re.search`), then the patterns with `fnmatch`."""

    def excluded(name: str, text: str) -> bool:
        if text.startswith("re:"):
            return re.search(text[3:], name) is not None
        if is_glob(text):
            return fnmatch.fnmatch(name, text) or fnmatch.fnmatch(name, text + ".*")
        return name == text or name.startswith(text + ".")

    def ask(name: str) -> str | None:
        for text in entries.excludes:
            if excluded(name, text):
                return None
        for text, found in entries.patterns:
            if re.search(text[3:], name) if text.startswith("re:") else fnmatch.fnmatch(name, text):
                return found
        return entries.default

    return ask


def vllm_online(entries: Entries) -> Ask:
    """Match every entry, literals too, with `fnmatch` or `re.match`; look at all patterns to refuse two that fit."""

    def fits(name: str, text: str) -> bool:
        return bool(re.match(text[3:], name)) if text.startswith("re:") else fnmatch.fnmatch(name, text)

    def ask(name: str) -> str | None:
        if any(fits(name, text) for text in entries.excludes):
            return None
        found = [value for text, value in entries.patterns if fits(name, text)]
        return found[0] if found else entries.default

    return ask


def vllm_quark(entries: Entries) -> Ask:
    """Compare literals, `re.match` expressions through the module's cache, then `fnmatch` the layer patterns."""
    excludes = [as_expression(text) for text in entries.excludes]
    patterns = [(as_expression(text) if text.startswith("re:") else text, found) for text, found in entries.patterns]

    def fits(name: str, text: str) -> bool:
        if text.startswith("re:"):
            return bool(re.match(text[3:], name))
        return name == text

    def ask(name: str) -> str | None:
        if any(fits(name, text) for text in excludes):
            return None
        for text, found in patterns:
            if fits(name, text) if text.startswith("re:") else fnmatch.fnmatch(name, text):
                return found
        return entries.default

    return ask


def plain_match(entries: Entries) -> Ask:
    """Call `re.match(pattern, name)` for each expression and compare literals: the least that anybody would write."""
    excludes = [as_expression(text) for text in entries.excludes]
    patterns = [(as_expression(text), found) for text, found in entries.patterns]

    def ask(name: str) -> str | None:
        for text in excludes:
            if re.match(text[3:], name) if text.startswith("re:") else name == text:
                return None
        for text, found in patterns:
            if re.match(text[3:], name) if text.startswith("re:") else name == text:
                return found
        return entries.default

    return ask


PEERS: dict[str, Callable[[Entries], Ask]] = {
    "ATOM": atom,
    "vLLM online": vllm_online,
    "vLLM Quark": vllm_quark,
    "re.match each": plain_match,
}


def forget_compiled() -> None:
    """Empty the caches of `re` and `fnmatch`, as in a process that has just started."""
    re.purge()
    fnmatch._compile_pattern.cache_clear()  # type: ignore[attr-defined]


def sample(names: Sequence[str], count: int) -> list[str]:
    """Return `count` names spread evenly over the model."""
    step = max(1, len(names) // count)
    return list(names[::step])
