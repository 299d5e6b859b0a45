"""What one document spends on patterns: bounded in sum, since each entry alone may be harmless."""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Final

from quant_spec.errors import ConfigError, Defect

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_EXPRESSIONS: Final = 250_000
"""Characters of all different `re:` expressions of a document; each counts as `EXPRESSION_CHARACTERS` more."""
EXPRESSION_CHARACTERS: Final = 30
"""What an expression counts beyond its characters: it is parsed on its own."""
MAX_SPECIAL_EXPRESSIONS: Final = 20_000
"""Characters of those among them that need more than the automaton: look-around, word bounds, flags, …."""
MAX_GLOBS: Final = 400_000
"""Characters of all globs of a document; each `[` counts as `BRACKET_CHARACTERS`."""
BRACKET_CHARACTERS: Final = 64
"""What one `[` of a glob counts: its set is compiled."""


class Account:
    """What the document that is being parsed has spent so far."""

    def __init__(self) -> None:
        """Start with nothing spent."""
        self._seen: set[str] = set()
        self._seen_special: set[str] = set()
        self._expressions = 0
        self._special = 0
        self._globs = 0

    def expression(self, text: str, path: str) -> None:
        """Add an expression before it is parsed. One that is written twice counts once.

        Raises:
            ConfigError: the document's expressions are longer together than they may be.
        """
        if text not in self._seen:
            total = self._expressions + len(text) + EXPRESSION_CHARACTERS
            self._check(total, MAX_EXPRESSIONS, "regular expressions", path)
            self._seen.add(text)
            self._expressions = total

    def special(self, text: str, path: str) -> None:
        """Add an expression that needs more than the automaton, likewise.

        Raises:
            ConfigError: the document's expressions of that kind are longer together than they may be.
        """
        if text not in self._seen_special:
            what = "regular expressions with look-around, word bounds, flags or back-references"
            self._check(self._special + len(text), MAX_SPECIAL_EXPRESSIONS, what, path)
            self._seen_special.add(text)
            self._special += len(text)

    def glob(self, text: str, path: str) -> None:
        """Add a glob.

        Raises:
            ConfigError: the document's globs are longer together than they may be.
        """
        total = self._globs + len(text) + (BRACKET_CHARACTERS - 1) * text.count("[")
        self._check(total, MAX_GLOBS, "globs", path)
        self._globs = total

    @staticmethod
    def _check(total: int, most: int, what: str, path: str) -> None:
        if total > most:
            problem = f"the {what} of this document have more than {most} characters together"
            raise ConfigError(Defect(path, problem, total, (f"<= {most} characters",)))


_CURRENT: Final[contextvars.ContextVar[Account | None]] = contextvars.ContextVar("account", default=None)


@contextlib.contextmanager
def document_account() -> Iterator[Account]:
    """Open the account of one document, for the time in which it is parsed."""
    account = Account()
    token = _CURRENT.set(account)
    try:
        yield account
    finally:
        _CURRENT.reset(token)


def current_account() -> Account | None:
    """Return the account of the document that is being parsed here; None outside one."""
    return _CURRENT.get()
