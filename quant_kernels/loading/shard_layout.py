"""Where each tensor of a safetensors file to be written goes; known before the first byte of data is.

Tensors stand in order of falling element size, as the safetensors library writes them: every one is aligned.
"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.loading.headers import DTYPE_BITS, LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_kernels.loading.storage import StoredPart

_ALIGNMENT: Final = 8


@attrs.frozen
class ShardLayout:
    """A file to be written.

    Attributes:
        file: its name, relative to the checkpoint folder.
        header: length prefix and header.
        offsets: tensor name -> index of its first byte in the file.
        nbytes: size of the file.
    """

    file: str
    header: bytes = attrs.field(repr=False)
    offsets: dict[str, int] = attrs.field(repr=False)
    nbytes: int

    @classmethod
    def plan(cls, file: str, parts: Iterable[StoredPart]) -> ShardLayout:
        """Lay out the tensors of one file.

        Args:
            file: its name.
            parts: its tensors, in model order.
        """
        ordered = sorted(parts, key=lambda part: -DTYPE_BITS[part.dtype])
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins: dict[str, int] = {}
        at = 0
        for part in ordered:
            end = at + part_nbytes(part)
            entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [at, end]}
            begins[part.name] = at
            at = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(LENGTH_BYTES, "little") + text
        offsets = {name: begin + len(header) for name, begin in begins.items()}
        return cls(file, header, offsets, len(header) + at)


def part_nbytes(part: StoredPart) -> int:
    """Return the bytes of a stored tensor's data."""
    return prod(part.shape) * DTYPE_BITS[part.dtype] // 8
