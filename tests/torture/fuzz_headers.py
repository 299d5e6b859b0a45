"""Fuzz what a checkpoint folder says: headers of safetensors files, and the index that lists them.

    python tests/torture/fuzz_headers.py [--runs N] [--seconds N] [--seed N] [--unguided]

A header's input is its JSON text, after two bytes that say how much data the file is to hold; an index is read from a
folder with one shard.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuzzing import FindingError, Target, main

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS: Final = {
    "model.embed_tokens.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]},
    "model.layers.0.mlp.up_proj.weight": {"dtype": "F8_E4M3", "shape": [4, 2], "data_offsets": [16, 24]},
    "model.layers.0.mlp.up_proj.weight_scale": {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]},
    "packed": {"dtype": "F4", "shape": [4, 2], "data_offsets": [28, 32]},
    "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA_BYTES: Final = 32
SHARD: Final = "model-00001-of-00001.safetensors"


def header_seeds() -> list[bytes]:
    """Return whole headers and smaller ones."""
    whole = {"__metadata__": {"format": "pt"}, **TENSORS}
    first = dict(list(TENSORS.items())[:1])
    return [_input(whole, DATA_BYTES), _input(TENSORS, DATA_BYTES), _input(first, 16), _input({}, 0)]


def _input(header: object, data_bytes: int) -> bytes:
    return json.dumps([data_bytes, header]).encode()


def index_seeds() -> list[bytes]:
    """Return indices as they are written."""
    whole = {"metadata": {"total_size": DATA_BYTES}, "weight_map": dict.fromkeys(TENSORS, SHARD)}
    return [
        json.dumps(whole).encode(),
        b'{"weight_map": {}}',
        json.dumps({"weight_map": {"a": f"../{SHARD}"}}).encode(),
    ]


def load() -> list[Target]:
    """Return both targets."""
    return [Target("headers", _headers(), header_seeds), Target("index", _index(), index_seeds)]


def _headers() -> Callable[[bytes], str]:
    from quant_kernels.loading.headers import parse_header
    from quant_spec import QuantSpecError

    def run(data: bytes) -> str:
        size, text = DATA_BYTES, data
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, list) and len(given) == 2 and type(given[0]) is int and 0 <= given[0] < 2**40:
            size, text = given[0], json.dumps(given[1]).encode()
        try:
            found = parse_header(text, "model.safetensors", size)
        except QuantSpecError as error:
            str(error).encode()
            return "refused"
        start = covered = min((each.start for each in found), default=0)
        for tensor in sorted(found, key=lambda each: (each.start, each.stop)):
            if tensor.start != covered or tensor.stop < tensor.start:
                message = f"{tensor.name}: bytes {tensor.start} to {tensor.stop} after {covered}"
                raise FindingError(message)
            covered = tensor.stop
        if found and covered - start != size:
            message = f"{covered} of {size} bytes are covered"
            raise FindingError(message)
        return "accepted"

    return run


def _index() -> Callable[[bytes], str]:
    from quant_kernels.loading.folder import open_folder
    from quant_spec import QuantSpecError

    outer = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, outer, ignore_errors=True)
    folder = outer / "model"
    folder.mkdir()
    header = json.dumps(TENSORS).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(DATA_BYTES)
    for place in (folder, outer):
        (place / SHARD).write_bytes(whole)
    (folder / "config.json").write_text("{}", "utf-8")

    def run(data: bytes) -> str:
        (folder / "model.safetensors.index.json").write_bytes(data)
        try:
            found = open_folder(folder)
        except QuantSpecError as error:
            str(error).encode()
            return "refused"
        listed = json.loads(data)["weight_map"]
        if not set(listed) <= set(TENSORS) or {Path(each).name for each in listed.values()} != {SHARD}:
            message = f"an index was accepted that does not list what is there: {listed}; {found}"
            raise FindingError(message)
        return "accepted"

    return run


if __name__ == "__main__":
    sys.exit(main(__file__, load, "quant_kernels.loading"))
