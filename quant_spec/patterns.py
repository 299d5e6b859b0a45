"""Pattern: one entry of a list or one key of a table, with its kind, its scope and the JSON path it came from.

`covers` is the plain statement of the rules, one name at a time. `resolver.py` gives the same answers faster.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import re
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.account import current_account
from quant_spec.arguments import check_instance
from quant_spec.errors import ConfigError, Defect, shown
from quant_spec.globs import MAX_BRACKET, compile_glob, longest_bracket
from quant_spec.regexes import check_regex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REGEX_PREFIX: Final = "re:"
EXPERTS: Final = "experts"


def is_glob(text: str) -> bool:
    """Tell whether `text` holds a wildcard."""
    return "*" in text or "?" in text or "[" in text


class PatternKind(enum.Enum):
    """How the text of an entry is read."""

    LITERAL = "literal"
    GLOB = "glob"
    REGEX = "regex"
    CLASS = "class"
    SLOT = "slot"


class Scope(enum.Enum):
    """Which modules a literal covers; it belongs to the parser, not to the text.

    SUBTREE: the module and what lies below it; a word without a dot is a whole segment anywhere in the name.
    EXACT: that module alone.
    RUN: a run of whole segments anywhere in the name, and what lies below.
    """

    SUBTREE = "subtree"
    EXACT = "exact"
    RUN = "run"


@attrs.frozen
class Pattern:
    """An entry as written.

    Attributes:
        text: the entry as it stands in the document, `re:` included; for a slot what the document calls it.
        path: its JSON path.
        kind: literal, glob, regex, class name, or the slot of all experts.
        scope: what a literal covers.
        target: the text that is matched: without `re:`, and renamed by a name mapping (literals only).
    """

    text: str
    path: str
    kind: PatternKind
    scope: Scope = Scope.SUBTREE
    target: str = attrs.field(default=attrs.Factory(lambda self: self.text, takes_self=True))

    @classmethod
    def parse(cls, text: str, path: str, scope: Scope = Scope.SUBTREE, *, classes: bool = False) -> Pattern:
        """Return the entry `text` found at `path`.

        Args:
            text: the entry as written.
            path: its JSON path, for messages.
            scope: what a literal covers in this document.
            classes: True if a capitalized word without a dot is a class name (compressed-tensors).

        Raises:
            ConfigError: a `re:` expression does not compile or could take too long, a `[...]` is too long, or the
                document that is being parsed has too many of either.
            ArgumentError: an argument is something else.
        """
        check_instance("text", text, str)
        check_instance("path", path, str)
        check_instance("scope", scope, Scope)
        if text.startswith(REGEX_PREFIX):
            expression = text[len(REGEX_PREFIX) :]
            check_regex(expression, path)
            return cls(text, path, PatternKind.REGEX, scope, expression)
        if is_glob(text):
            _check_glob(text, path)
            return cls(text, path, PatternKind.GLOB, scope, text)
        if classes and text[:1].isupper() and "." not in text:
            return cls(text, path, PatternKind.CLASS, scope, text)
        return cls(text, path, PatternKind.LITERAL, scope, text)

    @classmethod
    def parse_all(
        cls, texts: Sequence[str], path: str, scope: Scope = Scope.SUBTREE, *, classes: bool = False
    ) -> tuple[Pattern, ...]:
        """Return the entries of the list at `path`; empty ones match nothing and are left out.

        Raises:
            ConfigError: as `parse`, for the first that is refused.
        """
        if classes:
            return tuple(
                cls.parse(text, f"{path}[{place}]", scope, classes=True) for place, text in enumerate(texts) if text
            )
        found: list[Pattern] = []
        start = 0
        for place, text in enumerate(texts):
            if "*" in text or "?" in text or "[" in text or text.startswith(REGEX_PREFIX):
                found += _literals(texts[start:place], path, scope, start)
                found.append(cls.parse(text, f"{path}[{place}]", scope))
                start = place + 1
        found += _literals(texts[start:], path, scope, start)
        return tuple(found)

    @classmethod
    def slot(cls, kind: str, path: str) -> Pattern:
        """Return the entry that stands for all experts: vLLM's slot `moe`. Its `linear` is the global format."""
        return cls(kind, path, PatternKind.SLOT)

    def covers(self, name: str, class_name: str | None = None) -> bool:
        """Tell whether this entry covers the module `name` (renames and fusing apart)."""
        if not self.target:
            return False
        if self.kind is PatternKind.LITERAL:
            return self._literal_covers(name)
        if self.kind is PatternKind.GLOB:
            tried = (*ancestors_and_self(name), f"{name}.weight")
            return any(compile_glob(self.target).fullmatch(each) for each in tried)
        if self.kind is PatternKind.REGEX:
            return any(compile_regex(self.target).match(each) for each in (name, *containers(name)))
        if self.kind is PatternKind.SLOT:
            return EXPERTS in name.split(".")
        return class_name == self.target

    def _literal_covers(self, name: str) -> bool:
        if self.scope is Scope.EXACT:
            return name == self.target or self.target in containers(name)
        if self.scope is Scope.SUBTREE and "." in self.target:
            return f"{name}.".startswith(f"{self.target}.")
        return f".{self.target}." in f".{name}."

    def renamed(self, target: str) -> Pattern:
        """Return a copy that is matched as `target` and still prints as written."""
        return attrs.evolve(self, target=target)

    def __str__(self) -> str:
        """Return the entry as written."""
        return self.text


def _literals(texts: Sequence[str], path: str, scope: Scope, start: int) -> list[Pattern]:
    """Return literals field by field: thousands of them take half the time of as many initialisers."""
    if not texts:
        return []
    kept = texts
    places: Sequence[int] = range(start, start + len(texts))
    if not all(texts):
        kept = [text for text in texts if text]
        places = [place for place, text in enumerate(texts, start) if text]
    found = [*map(object.__new__, itertools.repeat(Pattern, len(kept)))]
    columns: dict[str, Iterable[object]] = {
        "text": kept,
        "path": [f"{path}[{place}]" for place in places],
        "kind": itertools.repeat(PatternKind.LITERAL),
        "scope": itertools.repeat(scope),
        "target": kept,
    }
    for name, values in columns.items():
        collections.deque(map(getattr(Pattern, name).__set__, found, values), maxlen=0)
    return found


def _check_glob(text: str, path: str) -> None:
    if len(text) > MAX_BRACKET and (longest := longest_bracket(text)) > MAX_BRACKET:
        problem = f"glob {shown(text)} has a set [...] of {longest} characters"
        raise ConfigError(Defect(path, problem, text, (f"<= {MAX_BRACKET} characters",)))
    account = current_account()
    if account is not None:
        account.glob(text, path)


@functools.lru_cache(maxsize=4_096)
def compile_regex(expression: str) -> re.Pattern[str]:
    """Compile once; the cache of `re` holds too few for a large document."""
    return re.compile(expression)


def ancestors_and_self(name: str) -> list[str]:
    """Return the dotted prefixes of `name`, shortest first, `name` last.

    >>> ancestors_and_self("a.b.c")
    ['a', 'a.b', 'a.b.c']
    """
    found = [name[:index] for index, character in enumerate(name) if character == "."]
    return [*found, name]


def containers(name: str) -> list[str]:
    """Return the expert containers above `name`: its proper ancestors whose last segment is `experts`.

    >>> containers("model.layers.0.mlp.experts.3.up_proj")
    ['model.layers.0.mlp.experts']
    """
    if EXPERTS not in name:
        return []
    return [each for each in ancestors_and_self(name)[:-1] if each.rpartition(".")[2] == EXPERTS]


def empty_entry(path: str) -> ConfigError:
    """Return the error for an empty key of a pattern table."""
    return ConfigError(Defect(path, f"empty pattern {shown('')}", "", (), "name a module, a glob or 're:…'"))
