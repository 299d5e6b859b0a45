"""The header of a safetensors file: which tensors it holds and where, checked before a byte of data is touched.

A file is 8 bytes (little-endian length of the header), the header (a JSON object), and the data. Every tensor names its
bytes by `data_offsets` from the start of the data; together they must cover the data without holes or overlaps.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

from quant_kernels.loading.within import Stamp, open_plain
from quant_spec.errors import LoadError, nearest, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the safetensors library sets."""
MAX_BITS: Final = 2**63 - 1
"""Most bits of a tensor: positions in files are signed 64-bit numbers."""

DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Names of the element types of safetensors and their bits; a shape counts elements, not bytes."""

_FIELDS: Final = itemgetter("dtype", "shape", "data_offsets")
_PLACE: Final = attrgetter("start", "stop")
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")


class StoredTensor(NamedTuple):
    """A tensor as a file stores it.

    Attributes:
        name: name in the checkpoint.
        dtype: safetensors name of the element type, a key of `DTYPE_BITS`.
        shape: sizes, in elements.
        file: name of the file, relative to the checkpoint folder.
        start: index of the first byte in the file.
        stop: index behind the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


def check_name(name: str, where: str) -> None:
    """Refuse a tensor or file name that is empty or holds control characters or lone surrogates.

    Raises:
        LoadError: with `where` and the escaped name.
    """
    if not name or _UNPRINTABLE.search(name):
        problem = "empty name" if not name else f"control characters in the name {shown(name)}"
        message = f"{where}: {problem}"
        raise LoadError(message)


def read_header(path: Path, file: str) -> list[StoredTensor]:
    """Return the tensors of one safetensors file, in the order of their data.

    Reads the header only.

    Args:
        path: the file; no link.
        file: its name for messages and for `StoredTensor.file`.

    Raises:
        LoadError: the file is truncated, or its header is too long, no JSON, or contradicts itself or the file's size.
    """
    return read_header_and_stamp(path, file)[0]


def read_header_and_stamp(path: Path, file: str) -> tuple[list[StoredTensor], Stamp]:
    """Return the tensors of one safetensors file as `read_header` does, and what tells whether it changes later."""
    try:
        with open_plain(path, file) as stream:
            stamp = Stamp.of(stream.fileno())
            size = stamp.size
            prefix = stream.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                message = f"{file}: {size} bytes are no safetensors file: it starts with 8 bytes of header length"
                raise LoadError(message)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                message = (
                    f"{file}: header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed (is it safetensors?)"
                )
                raise LoadError(message)
            if length > size - LENGTH_BYTES:
                message = f"{file}: truncated: a header of {length} bytes is announced, the file has {size} in all"
                raise LoadError(message)
            raw = stream.read(length)
    except OSError as error:
        message = f"{file}: cannot be read: {error.strerror or error}"
        raise LoadError(message) from error
    return parse_header(raw, file, size - LENGTH_BYTES - length), stamp


def parse_header(raw: bytes, file: str, data_bytes: int) -> list[StoredTensor]:
    """Return the tensors that a header describes, in the order of their data.

    Args:
        raw: the JSON object's bytes, trailing spaces allowed.
        file: the file's name, for messages and for `StoredTensor.file`.
        data_bytes: bytes that follow the header in the file.

    Raises:
        LoadError: as `read_header`.
    """
    if raw[:1] != b"{":
        message = f"{file}: no safetensors file: the header must start with '{{', it starts with {raw[:1]!r}"
        raise LoadError(message)
    document = load_object(raw, f"{file}: header")
    document.pop("__metadata__", None)
    origin = LENGTH_BYTES + len(raw)
    if not all(document) or _UNPRINTABLE.search("".join(document)):
        for name in document:
            check_name(name, file)
    found = []
    known: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, entry in document.items():
        try:
            dtype, shape, (begin, end) = _FIELDS(entry)  # type: ignore[arg-type]  # a wrong type is reported below
            # Few shapes, many tensors. The text of a shape tells 1 from true and from 1.0.
            kind = f"{dtype}{shape}"
            sizes, nbytes = known.get(kind) or known.setdefault(kind, _checked_size(dtype, shape))
            fits = type(begin) is type(end) is int and 0 <= begin <= end <= data_bytes and end - begin == nbytes
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise LoadError(_malformed(name, entry, file, data_bytes))
        found.append(StoredTensor(name, dtype, sizes, file, begin + origin, end + origin))
    found.sort(key=_PLACE)
    _check_cover(found, file, origin, origin + data_bytes)
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                message = f"repeated key {shown(name)}"
                raise ValueError(message)
            seen.add(name)
    return found


def _keys(document: object) -> int:
    """Return the keys of an object and of the objects right in it; what lies deeper is not counted.

    Each key stands before a colon, so a text with that many colons repeats none and has no other. Where there are more,
    in names or deeper down, the text is read again, key by key.
    """
    if not isinstance(document, dict):
        return 0
    return len(document) + sum(len(each) for each in document.values() if type(each) is dict)


def load_object(raw: bytes, where: str) -> dict[str, object]:
    """Return the JSON object in `raw`, repeated keys refused.

    Raises:
        LoadError: with `where` and the reason.
    """
    try:
        document = json.loads(raw)
        if raw.count(b":") != _keys(document):
            document = json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        message = f"{where}: nested too deeply"
        raise LoadError(message) from None
    except ValueError as error:
        message = f"{where}: no valid JSON: {error}"
        raise LoadError(message) from None
    if not isinstance(document, dict):
        message = f"{where}: a JSON object is required, found {shown(document)}"
        raise LoadError(message)
    return document


def _checked_size(dtype: str, shape: list[int]) -> tuple[tuple[int, ...], int]:
    """Return a shape and the bytes of a tensor of that shape.

    Raises:
        KeyError, ValueError: the dtype is unknown, the shape is no list of sizes, or the bytes are not whole.
    """
    bits = _bits(dtype, shape) if are_sizes(shape) else -1
    if bits < 0 or bits % 8:
        raise ValueError(shape)
    return tuple(shape), bits // 8


def _bits(dtype: str, shape: Sequence[int]) -> int:
    """Return the bits of a tensor, or −1 for more than `MAX_BITS`; the time does not grow with the sizes' digits."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits > MAX_BITS:
            return -1
    return bits


def _malformed(name: str, entry: object, file: str, data_bytes: int) -> str:
    """Say what is wrong with one entry of a header."""
    return f"{file}: tensor {shown(name)}: {_problem(entry, data_bytes)}"


def _problem(entry: object, data_bytes: int) -> str:
    if not isinstance(entry, dict):
        return f"an object with dtype, shape and data_offsets is required, found {shown(entry)}"
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        return f"{' and '.join(missing)} missing"
    return _wrong_value(entry["dtype"], entry["shape"], entry["data_offsets"], data_bytes)


def _wrong_value(dtype: object, shape: object, offsets: object, data_bytes: int) -> str:
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        near = nearest(dtype, DTYPE_BITS)
        hint = f"; did you mean {near!r}?" if near else ""
        return f"unknown dtype {shown(dtype)}; allowed: {', '.join(DTYPE_BITS)}{hint}"
    if not are_sizes(shape):
        return f"shape must be a list of sizes, found {shown(shape)}"
    if not are_sizes(offsets) or len(offsets) != len(("begin", "end")) or offsets[0] > offsets[1]:
        return f"data_offsets must be [begin, end], found {shown(offsets)}"
    if offsets[1] > data_bytes:
        return f"its data ends at byte {shown(offsets[1])}, the file holds {data_bytes} bytes of data (truncated?)"
    bits = _bits(dtype, shape)
    if bits < 0:
        return f"{dtype} {shown(shape)} takes more than {MAX_BITS} bits"
    need = f"{bits // 8}" if bits % 8 == 0 else f"{bits // 8} and {bits % 8}/8"
    return f"{dtype} {shown(shape)} takes {need} bytes, data_offsets {offsets} give {offsets[1] - offsets[0]}"


def are_sizes(value: object) -> TypeGuard[list[int]]:
    """Tell whether `value` is a list of whole numbers, none below zero (booleans do not count)."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_cover(tensors: list[StoredTensor], file: str, start: int, stop: int) -> None:
    """Refuse overlaps, holes and bytes that belong to no tensor."""
    at = start
    for tensor in tensors:
        if tensor.start != at:
            kind = "overlaps the tensor before it" if tensor.start < at else "leaves a hole before it"
            message = f"{file}: tensor {shown(tensor.name)} {kind}: it starts at byte {tensor.start}, expected {at}"
            raise LoadError(message)
        at = tensor.stop
    if at != stop:
        message = f"{file}: {stop - at} bytes behind the last tensor belong to no tensor"
        raise LoadError(message)
