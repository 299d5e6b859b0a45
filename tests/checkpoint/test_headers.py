"""Safetensors headers and indexes: read right, and refused by name when they lie."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.headers import MAX_HEADER_BYTES, load_object, read_header
from quant_spec import ConfigError, LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "model.safetensors"


def raw_file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(*offsets: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(3, 4),
        "b": torch.zeros(0, 4, dtype=torch.bfloat16),
        "c": torch.tensor(1.0, dtype=torch.float16),
        "d": torch.zeros(5, dtype=torch.uint8),
        "e": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in read_header(tmp_path / NAME, NAME)}
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    raw = (tmp_path / NAME).read_bytes()
    for name, tensor in load_file(tmp_path / NAME).items():
        assert raw[found[name].start : found[name].stop] == bytes(tensor.view(-1).view(torch.uint8).tolist())


BAD_HEADERS: list[tuple[str, object, bytes, str]] = [
    ("no JSON", b"{nonsense", b"", "no valid JSON"),
    ("not an object", b"[1, 2]", b"", "must start with '{'"),
    ("repeated tensor", b'{"a": {}, "a": {}}', b"", "repeated key 'a'"),
    ("entry is a list", {"a": []}, b"", "an object with dtype, shape and data_offsets"),
    ("missing key", {"a": {"dtype": "F32", "shape": [1]}}, b"1234", "data_offsets missing"),
    ("unknown dtype", {"a": entry(0, 8, dtype="BF_16")}, b"12345678", "unknown dtype 'BF_16'"),
    ("negative size", {"a": entry(0, 8, shape=(-2,))}, b"12345678", "shape must be a list of sizes"),
    ("boolean size", {"a": entry(0, 4, shape=(True,))}, b"1234", "shape must be a list of sizes"),
    ("fractional size", b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', b"1234", "shape must be"),
    ("three offsets", {"a": entry(0, 4, 8)}, b"12345678", "data_offsets must be [begin, end]"),
    ("offsets reversed", {"a": entry(8, 0)}, b"12345678", "data_offsets must be [begin, end]"),
    ("wrong size", {"a": entry(0, 4)}, b"1234", "takes 8 bytes, data_offsets [0, 4] give 4"),
    ("out of range", {"a": entry(0, 8)}, b"1234", "ends at byte 8, the file holds 4 bytes"),
    ("overlap", {"a": entry(0, 8), "b": entry(4, 12)}, b"123456789012", "overlaps the tensor before it"),
    ("hole", {"a": entry(0, 8), "b": entry(12, 20)}, b"0" * 20, "leaves a hole before it"),
    ("trailing bytes", {"a": entry(0, 8)}, b"0" * 12, "4 bytes behind the last tensor"),
    ("control character", {"a\u0007b": entry(0, 8)}, b"12345678", "control characters in the name 'a\\x07b'"),
    ("empty name", {"": entry(0, 8)}, b"12345678", "empty name"),
    ("NaN offsets", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [NaN, 8]}}', b"12345678", "data_offsets"),
    ("deep nesting", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"", "nested too deeply"),
    ("huge number", b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", b"", "no valid JSON"),
]


@pytest.mark.parametrize(("header", "data", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_HEADERS])
def test_bad_header_is_refused_by_name(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    path = raw_file(tmp_path / NAME, header, data)
    with pytest.raises(LoadError) as caught:
        read_header(path, NAME)
    assert str(caught.value).startswith(f"{NAME}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (MAX_HEADER_BYTES + 1, "at most 100000000"),
        (2**40, "at most 100000000"),
        (2**63, "at most"),
        (500, "truncated: a header of 500 bytes"),
    ],
)
def test_header_length_is_checked_before_it_is_read(tmp_path: Path, length: int, message: str) -> None:
    path = raw_file(tmp_path / NAME, {"a": entry(0, 8)}, b"12345678", length=length)
    with pytest.raises(LoadError, match=message):
        read_header(path, NAME)


@pytest.mark.parametrize("size", [0, 3, 7])
def test_tiny_file(tmp_path: Path, size: int) -> None:
    (tmp_path / NAME).write_bytes(b"x" * size)
    with pytest.raises(LoadError, match=f"{size} bytes are no safetensors file"):
        read_header(tmp_path / NAME, NAME)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / NAME)
    whole = (tmp_path / NAME).read_bytes()
    for size in range(len(whole)):
        (tmp_path / NAME).write_bytes(whole[:size])
        with pytest.raises(LoadError):
            read_header(tmp_path / NAME, NAME)


def index_of(folder: Path) -> dict[str, dict[str, str]]:
    index: dict[str, dict[str, str]] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def first_file(folder: Path, value: object) -> None:
    index = index_of(folder)
    index["weight_map"][next(iter(index["weight_map"]))] = value  # type: ignore[assignment]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def duplicate(folder: Path) -> None:
    one = load_file(folder / "model-00001-of-00003.safetensors")
    two = load_file(folder / "model-00002-of-00003.safetensors")
    name = next(iter(one))
    save_file({**two, name: one[name]}, folder / "model-00002-of-00003.safetensors")


def outside_link(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")


def swapped(folder: Path) -> None:
    one, two = folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def emptied(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"")


def cut(folder: Path) -> None:
    path = folder / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)


BAD_FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "missing shard",
        lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
        "'model-00002-of-00003.safetensors'",
    ),
    ("parent path", lambda d: first_file(d, "../x.safetensors"), "'../x.safetensors' lies outside"),
    ("absolute path", lambda d: first_file(d, "/etc/passwd"), "'/etc/passwd' lies outside"),
    ("windows path", lambda d: first_file(d, "..\\x.safetensors"), "lies outside"),
    ("link outside", outside_link, "outside the checkpoint folder"),
    ("control character", lambda d: first_file(d, "a\x1b[31m.safetensors"), "control characters"),
    ("file is a number", lambda d: first_file(d, 3), "a file name is required, found 3"),
    ("wrong shard", lambda d: first_file(d, "model-00002-of-00003.safetensors"), "should be in model-00002"),
    ("index is no JSON", lambda d: (d / "model.safetensors.index.json").write_text("{"), "no valid JSON"),
    ("index is a list", lambda d: (d / "model.safetensors.index.json").write_text("[]"), "a JSON object is required"),
    ("no weight_map", lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map must be an object"),
    ("shards swapped", swapped, "should be in model-0000"),
    ("empty shard", emptied, "model-00002-of-00003.safetensors: 0 bytes are no safetensors file"),
    ("truncated shard", cut, "model-00003-of-00003.safetensors: tensor"),
    ("duplicate", duplicate, "is stored twice: in model-0000"),
    ("no config", lambda d: (d / "config.json").unlink(), "config.json: missing"),
]


@pytest.mark.parametrize(("damage", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_FOLDERS])
def test_bad_folder_is_refused(moe_dir: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(moe_dir)
    with pytest.raises(LoadError) as caught:
        open_folder(moe_dir)
    assert message in str(caught.value)


def test_missing_shard_suggests_the_nearest(moe_dir: Path) -> None:
    first_file(moe_dir, "model-00001-of-00004.safetensors")
    with pytest.raises(LoadError, match=r"did you mean 'model-00001-of-00003\.safetensors'"):
        open_folder(moe_dir)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "{\u201cmodel_type\u201d: 1}", '{"a": NaN}'])
def test_bad_config_json_is_refused(llama_dir: Path, text: str) -> None:
    (llama_dir / "config.json").write_text(text)
    with pytest.raises((ConfigError, LoadError), match=r"config\.json"):
        open_folder(llama_dir)


def test_no_weights_lists_what_is_there(llama_dir: Path) -> None:
    (llama_dir / NAME).rename(llama_dir / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor .* found pytorch_model\.bin"):
        open_folder(llama_dir)


def test_hub_cache_links_are_followed(llama_dir: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "rev"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", NAME):
        (llama_dir / name).rename(blobs / f"sha-{name}")
        (snapshot / name).symlink_to(Path("..", "..", "blobs", f"sha-{name}"))
    assert len(open_folder(snapshot).tensors) > 0


def test_tensors_beside_the_index_are_reported(moe_dir: Path) -> None:
    index = index_of(moe_dir)
    del index["weight_map"]["model.norm.weight"]
    (moe_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = open_folder(moe_dir)
    assert "model.norm.weight" in folder.tensors
    assert any("model.norm.weight" in warning for warning in folder.warnings)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": {"b": {"c": 1, "c": 2}}}',
        '{"a": {"x": [{"q": 1, "q": 2}]}}',
        r'{"\u0061": 1, "a": 2}',
        '{"a": "::", "a": 1}',
        '{"a": {"b": "c:"}, "d": {"e": 1, "e": 2}}',
    ],
)
def test_repeated_keys_are_found_at_every_depth(text: str) -> None:
    with pytest.raises(LoadError, match="repeated key"):
        load_object(text.encode(), "file")


@pytest.mark.parametrize(
    "text", ['{"a:b": 1, "b": {"c": ":"}}', '{"a" : {"b" : {"c" : {}}}}', r'{"a\u003a": 1, "b": 2}', "{}"]
)
def test_colons_and_depth_are_no_repeated_keys(text: str) -> None:
    assert load_object(text.encode(), "file") == json.loads(text)
