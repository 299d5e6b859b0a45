"""A JSON reader that knows where it is: JSON path, line and column of the first thing that must be refused."""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn

import attrs

from quant_spec.errors import ConfigError, Defect, join_path, shown

MAX_DEPTH: Final = 64
"""Greatest number of objects and lists inside each other. Real documents need about eight."""

_TYPOGRAPHIC_QUOTES: Final = "\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u201b\u00ab\u00bb\u2039\u203a\uff02\uff07"
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_STRING: Final = re.compile(r'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)"')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD: Final = re.compile(r"[-+]?[A-Za-z_]+")
_CONSTANTS: Final[dict[str, bool | None]] = {"null": None, "true": True, "false": False}
_LONGEST_INTEGER: Final = 400


@attrs.define
class _Open:
    """An object or list that is being filled."""

    value: dict[str, object] | list[object]
    path: str
    key: str = ""

    @property
    def member_path(self) -> str:
        return join_path(self.path, self.key if isinstance(self.value, dict) else len(self.value))


class JsonScanner:
    """Reads one document with an explicit stack, so that no nesting can exhaust Python's."""

    def __init__(self, text: str, name: str) -> None:
        """Take the text and what to call it in messages."""
        self._text = text
        self._name = name
        self._at = 0
        self._stack: list[_Open] = []

    def read(self) -> object:
        """Return the value of the document.

        Raises:
            ConfigError: with the one defect that stopped the reading.
        """
        value: object = None
        while True:
            self._skip()
            value = self._value()
            while self._stack and not isinstance(value, _Open):
                self._add(value)
                value = self._after_member()
            if not self._stack and not isinstance(value, _Open):
                self._skip()
                if self._at < len(self._text):
                    self._refuse(f"text after the document: {shown(self._text[self._at :][:20])}")
                return value

    def _value(self) -> object:
        """Return the scalar here, or open the container here and return it (or its value if it is empty)."""
        character = self._peek()
        if character in "{[":
            return self._open(character)
        if character == '"':
            return self._string()
        number = _NUMBER.match(self._text, self._at)
        if number is not None and not self._text.startswith(("-Infinity", "-NaN"), self._at):
            return self._number(number)
        word = _WORD.match(self._text, self._at)
        if word is not None and word[0] in _CONSTANTS:
            self._at = word.end()
            return _CONSTANTS[word[0]]
        if word is not None and word[0].lstrip("+-").lower() in {"nan", "infinity", "inf"}:
            self._refuse(f"{word[0]} is no JSON number", value=word[0], expected=("a finite number",))
        return self._unexpected("a value")

    def _open(self, character: str) -> object:
        if len(self._stack) >= MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} levels deep", path="$")
        opened = _Open({} if character == "{" else [], self._path())
        self._at += 1
        self._skip()
        if self._peek() == ("}" if character == "{" else "]"):
            self._at += 1
            return opened.value
        self._stack.append(opened)
        if character == "{":
            self._key()
        return opened

    def _key(self) -> None:
        opened = self._stack[-1]
        self._skip()
        if self._peek() != '"':
            self._unexpected("a key in double quotes", path=opened.path)
        start = self._at
        opened.key = self._string(path=opened.path)
        if isinstance(opened.value, dict) and opened.key in opened.value:
            path = join_path(opened.path, opened.key)
            self._refuse(f"key {shown(opened.key)} is given twice", path=path, value=opened.key, at=start)
        self._skip()
        if self._peek() != ":":
            self._unexpected("':'", path=opened.path)
        self._at += 1

    def _add(self, value: object) -> None:
        opened = self._stack[-1]
        if isinstance(opened.value, dict):
            opened.value[opened.key] = value
        else:
            opened.value.append(value)

    def _after_member(self) -> object:
        """Go on to the next member and return the open container, or close it and return its value."""
        opened = self._stack[-1]
        closing = "}" if isinstance(opened.value, dict) else "]"
        self._skip()
        if self._peek() == closing:
            self._at += 1
            self._stack.pop()
            return opened.value
        if self._peek() != ",":
            self._unexpected(f"',' or '{closing}'", path=opened.path)
        self._at += 1
        self._skip()
        if self._peek() == closing:
            self._refuse(f"a comma before '{closing}'", path=opened.path)
        if isinstance(opened.value, dict):
            self._key()
        return opened

    def _string(self, path: str | None = None) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            self._refuse("a string that does not end, or holds a control character or an unknown escape", path=path)
        text = match[1]
        value = str(json.loads(match[0])) if "\\" in text else text
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(value[error.start]):04x}"
            self._refuse(f"lone surrogate {code} in a string", path=path, value=value)
        self._at = match.end()
        return value

    def _number(self, match: re.Match[str]) -> int | float:
        text = match[0]
        if match[1] is None and match[2] is None:
            if len(text) > _LONGEST_INTEGER:
                self._refuse(f"an integer of {len(text)} digits; at most {_LONGEST_INTEGER} are read")
            self._at = match.end()
            return int(text)
        number = float(text)
        if number in {float("inf"), float("-inf")}:
            self._refuse(f"{text} is too large for a number", value=text, expected=("a finite number",))
        self._at = match.end()
        return number

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else "\0"

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _path(self) -> str:
        return self._stack[-1].member_path if self._stack else "$"

    def _unexpected(self, wanted: str, path: str | None = None) -> NoReturn:
        if self._at >= len(self._text):
            self._refuse(f"the text ends where {wanted} is expected", path=path)
        character = self._text[self._at]
        if character in _TYPOGRAPHIC_QUOTES:
            problem = f"typographic quote {character} (U+{ord(character):04X}) where {wanted} is expected"
            self._refuse(problem, path=path, value=character, hint='use straight double quotes: "')
        hint = 'JSON strings and keys stand in double quotes: "' if character == "'" else ""
        self._refuse(f"{shown(character)} where {wanted} is expected", path=path, value=character, hint=hint)

    def _refuse(
        self,
        problem: str,
        *,
        path: str | None = None,
        value: object = None,
        expected: tuple[str, ...] = (),
        hint: str = "",
        at: int | None = None,
    ) -> NoReturn:
        place = self._at if at is None else at
        line = self._text.count("\n", 0, place) + 1
        column = place - self._text.rfind("\n", 0, place)
        where = f"{problem} at line {line}, column {column} of {self._name}"
        raise ConfigError(Defect(self._path() if path is None else path, where, value, expected, hint))
