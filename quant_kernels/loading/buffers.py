"""Buffers: memory on the device for whole weights, which plain pieces are copied straight into.

A weight that lies in one piece is converted as one source, however many tensors it came in.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.sources import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch
    from torch import Tensor

    from quant_kernels.loading.arrivals import Address
    from quant_kernels.loading.modules import WeightSlot

_STACK: Final = 3


class SlotBuffers:
    """The buffers of one layer, one a weight at most. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        """Start without any."""
        self._buffers: dict[int, Tensor] = {}
        self._claimed: dict[int, torch.dtype] = {}
        self._inside: dict[int, set[tuple[int | None, int | None]]] = {}

    def claim(self, slot: WeightSlot, address: Address, piece: Tensor) -> int:
        """Return the bytes that a piece will take: all of the weight's for the first piece, none for the others.

        Args:
            slot: the weight.
            address: where the piece lies.
            piece: its values; one that cannot lie in a buffer takes its own size.
        """
        if _rows(slot, address, piece) is None:
            return piece.nbytes
        dtype = self._claimed.get(address.slot)
        if dtype is None:
            self._claimed[address.slot] = piece.dtype
            count = piece.dtype.itemsize
            for size in slot.shape:
                count *= size
            return count
        return 0 if dtype is piece.dtype else piece.nbytes

    def view(
        self,
        slot: WeightSlot,
        address: Address,
        piece: Tensor,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Tensor | None:
        """Return the contiguous memory that a piece is to be copied into, or None.

        Args:
            slot: the weight.
            address: where the piece lies.
            piece: its values.
            allocate: gives memory of a shape and dtype.
        """
        rows = _rows(slot, address, piece)
        if rows is None or self._claimed.get(address.slot) is not piece.dtype:
            return None
        buffer = self._buffers.get(address.slot)
        if buffer is None:
            buffer = self._buffers[address.slot] = allocate(slot.shape, piece.dtype)
        self._inside.setdefault(address.slot, set()).add((address.expert, address.shard))
        return buffer[..., rows, :] if address.expert is None else buffer[address.expert, rows]

    def has(self, slot: int) -> bool:
        """Tell whether the buffer of a weight is there."""
        return slot in self._buffers

    def whole(self, slot: int, cells: Collection[tuple[int | None, int | None]]) -> Tensor | None:
        """Return the buffer of a weight if all its pieces, by expert and shard, are in it."""
        return self._buffers.get(slot) if self._inside.get(slot) == set(cells) else None


def _rows(slot: WeightSlot, address: Address, piece: Tensor) -> slice | None:
    """Return the rows of a plain piece that are one run of memory in the whole weight, or None."""
    if address.content != "weight" or not is_plain(piece) or slot.transposed:
        return None
    if address.shard is None:
        return slice(0, slot.shape[-2])
    if slot.interleaved or slot.shard_rows is None or (len(slot.shape) == _STACK and address.expert is None):
        return None
    starts = (0, *itertools.accumulate(slot.shard_rows))
    return slice(starts[address.shard], starts[address.shard + 1])
