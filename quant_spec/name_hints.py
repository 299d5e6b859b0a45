"""What an entry that fits no module may have been meant for, in a time that neither names nor entries can stretch.

An entry is compared part by part with the distinct segments of all names, of which even the largest models have few.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SEGMENTS: Final = 1000
"""Distinct segments that misspelt parts are compared with."""
MAX_SEARCHES: Final = 100
"""Misspelt parts that are looked for in one model; entries beyond them get no hint from likeness."""
MAX_SHAPES: Final = 6
"""Kinds of modules that a part may stand in to tell anything; `layers` stands in all of them."""
SHOWN: Final = 3
"""Hints for an entry at most."""
_MAX_PART: Final = 100
_SHORT: Final = 4
_LIKENESS: Final = 0.7
_LIKENESS_OF_SHORT: Final = 0.6
"""Least likeness of two parts, of which short ones differ in a letter soon."""
_PART: Final = re.compile(r"[\w-]+")
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


class NameHints:
    """The segments of a model's names, and the names without their block numbers."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names of all modules."""
        self._shapes: dict[str, dict[str, None]] = defaultdict(dict)
        for shape in dict.fromkeys(_NUMBER.sub("*", name) for name in names):
            for segment in shape.split("."):
                self._shapes[segment][shape] = None
        self._shapes.pop("*", None)
        self._lower = {segment.lower(): segment for segment in self._shapes}
        self._compared = list(self._lower)[:MAX_SEGMENTS]
        self._found: dict[str, str | None] = {}

    def of(self, entry: str) -> tuple[str, ...]:
        """Return what an entry may have been meant for.

        Args:
            entry: a literal, glob or `re:` expression that fits no module.

        Returns:
            The entry with its misspelt parts corrected; else up to `SHOWN` globs over the names that hold the last of
            its parts that tells anything; else nothing.

        >>> hints = NameHints(["lm_head", *(f"model.layers.{n}.block_sparse_moe.gate" for n in range(32))])
        >>> hints.of("lm_haed"), hints.of("*.mlp.gate.*"), hints.of("*.router")
        (('lm_head',), ('model.layers.*.block_sparse_moe.gate',), ())
        """
        plain = entry.removeprefix("re:")
        parts = [part for part in dict.fromkeys(_PART.findall(plain)) if not part.isdigit()]
        known = {part: self._like(part) for part in parts}
        if all(known.values()) and any(part != like for part, like in known.items()):
            corrected = _PART.sub(lambda found: known.get(found[0]) or found[0], plain)
            return (entry[: len(entry) - len(plain)] + corrected,)
        for part in reversed(parts):
            shapes = self._shapes.get(known[part] or "", {})
            if 0 < len(shapes) <= MAX_SHAPES:
                return tuple(shapes)[:SHOWN]
        return ()

    def _like(self, part: str) -> str | None:
        """Return the segment that a part is, or looks most like."""
        if part in self._shapes:
            return part
        if part not in self._found:
            self._found[part] = self._search(part)
        return self._found[part]

    def _search(self, part: str) -> str | None:
        if len(self._found) >= MAX_SEARCHES or len(part) > _MAX_PART:
            return self._lower.get(part.lower())
        cutoff = _LIKENESS_OF_SHORT if len(part) <= _SHORT else _LIKENESS
        near = difflib.get_close_matches(part.lower(), self._compared, n=1, cutoff=cutoff)
        return self._lower[near[0]] if near else None


def did_you_mean(hints: tuple[str, ...]) -> str:
    """Return hints as the end of a message, or an empty text.

    >>> did_you_mean(("lm_head",)), did_you_mean(("a", "b")), did_you_mean(())
    ("; did you mean 'lm_head'?", "; did you mean 'a' or 'b'?", '')
    """
    listed = " or ".join(map(repr, hints))
    return f"; did you mean {listed}?" if hints else ""
