"""Raw JSON text to an object, strictly: a repeated key, NaN and the like are refused with their place.

The fast path is the standard library's scanner. Only a text that it refuses, or that looks suspicious, is read again by
`JsonScanner`, which is slower, never recurses, and knows the JSON path, the line and the column of what it stumbles on.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePath
from typing import Final, NoReturn

from quant_spec.arguments import check_instance
from quant_spec.errors import ConfigError, Defect
from quant_spec.json_scanner import MAX_DEPTH, JsonScanner


class _Suspicious(Exception):  # noqa: N818  (a signal to read again, not an error)
    """The text may have to be refused; read it again slowly."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Suspicious
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Suspicious
    return number


def _constant(_: str) -> NoReturn:
    raise _Suspicious


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_constant)


def load_json(text: str | bytes, name: str = "<text>") -> object:
    """Return the value that the JSON `text` stands for.

    Args:
        text: a JSON document; bytes are UTF-8, with or without a byte order mark.
        name: what to call the text in messages, such as a file name.

    Returns:
        dict, list, str, int, float, bool or None, nested; every number is finite, every key occurs once.

    Raises:
        ConfigError: not JSON, a repeated key, typographic quotes, NaN or Infinity, a lone surrogate, or more than
            `MAX_DEPTH` levels of nesting; the message gives the JSON path, the line and the column.
        ArgumentError: it is no text.
    """
    check_instance("text", text, str, bytes)
    document = _decode(text, name) if isinstance(text, bytes) else text.removeprefix("\ufeff")
    try:
        value: object = _DECODER.decode(document)
    except (_Suspicious, ValueError, RecursionError):
        return JsonScanner(document, name).read()
    deep = document.count("[") + document.count("{") > MAX_DEPTH
    if deep or "\\u" in document or not document.isascii():
        return JsonScanner(document, name).read() if _doubtful(value) else value
    return value


def read_json(path: str | Path) -> object:
    """Return the value in the JSON file at `path`.

    Raises:
        ConfigError: the file cannot be read, or `load_json` refuses its text.
        ArgumentError: it is no path.
    """
    check_instance("path", path, str, PurePath)
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(Defect("$", f"cannot read {str(path)!r}: {reason}", str(path))) from None
    return load_json(content, str(path))


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        byte = content[error.start]
        problem = f"{name} is not UTF-8 text: byte 0x{byte:02x} at line {line}, column {column}"
        raise ConfigError(Defect("$", problem, byte, ("UTF-8",))) from None


def _doubtful(value: object) -> bool:
    """Tell whether `value` is nested too deeply or holds a string that no text encoding can carry."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each)
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
            elif isinstance(each, str) and not each.isascii() and _has_surrogate(each):
                return True
        if not inner:
            return False
        level = inner
    return any(isinstance(each, (dict, list)) or (isinstance(each, str) and _has_surrogate(each)) for each in level)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
