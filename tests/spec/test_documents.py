"""Strict JSON: what an ordinary reader lets pass is refused with its path, line and column, in bounded time."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant_spec import ConfigError
from quant_spec.documents import load_json, read_json
from quant_spec.json_scanner import MAX_DEPTH, JsonScanner

if TYPE_CHECKING:
    from pathlib import Path

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_reads_what_json_writes(value: object, indent: int | None, ascii_only: bool) -> None:  # noqa: FBT001
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert load_json(text) == value
    assert load_json(text.encode()) == value
    assert load_json("\ufeff" + text) == value
    assert JsonScanner(text, "text").read() == value


REFUSED = [
    ('{"a": 1, "b": {"c": 2, "c": 3}}', ["$.b.c", "'c'", "twice", "line 1, column 24"]),
    ('{\n "a": [1,\n  NaN]}', ["$.a[1]", "NaN", "line 3, column 3"]),
    ("[-Infinity]", ["$[0]", "-Infinity"]),
    ("[+Infinity]", ["$[0]"]),
    ("[1e999]", ["$[0]", "1e999", "finite"]),
    ("[-1E+999]", ["$[0]", "-1E+999"]),
    ('{"a": "\\ud800"}', ["$.a", "surrogate", "ud800"]),
    ('{"\\udc00x": 1}', ["$", "surrogate", "udc00"]),
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), ["$", str(MAX_DEPTH), "deep"]),
    ("[" * 10_000, ["$", "deep"]),
    ('{"a":' * 10_000, ["$", "deep"]),
    ("{\u201cglobal_quant_config\u201d: 1}", ["typographic", "U+201C", "line 1, column 2", "straight"]),
    ('{"a": \u2018mxfp4\u2019}', ["$.a", "typographic", "U+2018"]),
    ("{'a': 1}", ["double quotes"]),
    ('{"a": 1,}', ["comma before '}'"]),
    ("[1, 2,]", ["comma before ']'"]),
    ('{"a": 1} // x', ["after the document"]),
    ('{"a" 1}', ["':'"]),
    ("[1 2]", ["',' or ']'", "'2'"]),
    ('{"a": 1 "b": 2}', ["',' or '}'"]),
    ("", ["ends", "value"]),
    ("[", ["ends"]),
    ('{"a": tru}', ["$.a"]),
    ('"abc', ["string"]),
    ('"a\nb"', ["string", "control"]),
    ('"\\x41"', ["escape"]),
    ("9" * 5_000, ["5000 digits"]),
    ("01", ["after the document"]),
]


@pytest.mark.parametrize(("text", "names"), REFUSED, ids=[text[:24] for text, _ in REFUSED])
def test_refused(text: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_json(text, "request.json")
    missing = [name for name in [*names, "request.json"] if name not in str(raised.value)]
    assert not missing, raised.value


def test_depth_that_is_allowed() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(load_json(text)) == text
    assert JsonScanner(text, "text").read() == load_json(text)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ConfigError, match=r"0xff at line 2, column 3"):
        load_json(b'{\n "\xff": 1}')


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="directory"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(f'"model.layers.{index}"' for index in range(200_000)) + "]",
        '["' + "a" * 1_000_000 + '"]',
        "{" + ",".join(f'"k{index}": {{"a": [1]}}' for index in range(20_000)) + ', "k0": 1}',
        '["\\u00e9' + "é" * 1_000_000 + '", NaN]',
    ],
    ids=["many", "long", "repeated", "nan-last"],
)
def test_large_documents_take_bounded_time(text: str) -> None:
    start = time.perf_counter()
    try:
        load_json(text)
    except ConfigError as error:
        assert "twice" in str(error) or "NaN" in str(error)  # noqa: PT017  (either outcome is right; only time counts)
    assert time.perf_counter() - start < 10
