"""Cuts: a rank's piece of a tensor that arrives whole, its scales included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from quant_spec import LoadError
from quant_spec.granularity import PerBlock, PerChannel, PerGroup

if TYPE_CHECKING:
    from torch import Tensor

    from quant_spec.granularity import Granularity


@attrs.frozen
class Window:
    """The part of a whole weight that this rank holds.

    Attributes:
        whole: rows and columns of the whole, in elements.
        rows: first and last (past the end) row; (0, -1): all, however many there are.
        cols: first and last (past the end) column.
    """

    whole: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def is_whole(self) -> bool:
        """True if that is all of it."""
        return self.rows == (0, self.whole[0]) and self.cols == (0, self.whole[1])

    @property
    def knows_rows(self) -> bool:
        """True if the number of rows is known."""
        return self.rows[1] >= 0

    def offset(self, granularity: Granularity | None) -> tuple[int, int]:
        """Return row and column of the first element within the first block of scales."""
        if not isinstance(granularity, PerBlock):
            return (0, 0)
        return max(self.rows[0], 0) % granularity.rows, self.cols[0] % granularity.cols


def packed_per_byte(tensor: Tensor) -> int:
    """Return the elements in one element of a stored weight: 2 where 4-bit codes are packed."""
    return 2 if tensor.dtype in (torch.uint8, torch.float4_e2m1fn_x2) else 1


def cut_weight(name: str, tensor: Tensor, window: Window, *, lead: tuple[int, ...], most_rows: int) -> Tensor:
    """Return this rank's piece of a weight.

    Args:
        name: its name.
        tensor: the whole, or the piece already.
        window: what this rank holds.
        lead: leading sides, (E,) for a stack.
        most_rows: rows that it may have at most where they are not known.

    Raises:
        LoadError: its shape is neither the whole's nor the piece's.
    """
    per_byte = packed_per_byte(tensor)
    rows = window.rows[1] - window.rows[0] if window.knows_rows else (tensor.shape[-2] if tensor.dim() > 1 else 0)
    local = (*lead, rows, (window.cols[1] - window.cols[0]) // per_byte)
    whole = (*lead, window.whole[0] if window.knows_rows else rows, window.whole[1] // per_byte)
    if tuple(tensor.shape) == local and (window.knows_rows or rows <= most_rows):
        return tensor
    if tuple(tensor.shape) != whole or not window.knows_rows:
        shapes = f"{list(whole)} (whole) or {list(local)} (this rank's)" if local != whole else f"{list(local)}"
        if not window.knows_rows:
            shapes = f"[.., at most {most_rows} rows, {local[-1]}]"
        raise LoadError(f"{name}: shape {list(tensor.shape)}; allowed: {shapes}")
    if window.cols[0] % per_byte:
        raise LoadError(f"{name}: a cut at column {window.cols[0]} goes through a byte of packed codes")
    cols = slice(window.cols[0] // per_byte, window.cols[1] // per_byte)
    return _owned(tensor[..., window.rows[0] : window.rows[1], cols])


def _owned(view: Tensor) -> Tensor:
    """Return a copy without gaps; the side that lies side by side in memory stays that."""
    if view.stride(-1) != 1 and view.stride(-2) == 1:
        return view.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
    return view.clone(memory_format=torch.contiguous_format)


def cut_scale(name: str, scale: Tensor, window: Window, granularity: Granularity | None) -> Tensor:
    """Return the scales that this rank's piece of a weight overlaps.

    Args:
        name: their name.
        scale: the scales of the whole, or those of the piece already.
        window: what this rank holds of the weight.
        granularity: which elements share a scale.

    Raises:
        LoadError: their shape is neither the whole's nor the piece's, or the cut goes through a group.
    """
    if window.is_whole or not window.knows_rows or scale.numel() == 1:
        return scale
    if isinstance(granularity, PerChannel):
        return _cut_rows(scale, window)
    if isinstance(granularity, PerBlock):
        steps = (granularity.rows, granularity.cols)
    elif isinstance(granularity, PerGroup):
        steps = (1, granularity.group_size)
        if any(col % granularity.group_size for col in window.cols):
            message = f"{name}: a cut at column {window.cols[0]} goes through a group of {granularity.group_size}"
            raise LoadError(message)
    else:
        return scale
    (r0, r1), (c0, c1) = (
        (first // step, -(-past // step)) for (first, past), step in zip((window.rows, window.cols), steps, strict=True)
    )
    whole = [-(-size // step) for size, step in zip(window.whole, steps, strict=True)]
    local = [r1 - r0, c1 - c0]
    if list(scale.shape[-2:]) == local:
        return scale
    if list(scale.shape[-2:]) != whole:
        raise LoadError(f"{name}: shape {list(scale.shape)}; allowed: [.., {whole[0]}, {whole[1]}] or {local}")
    return scale[..., r0:r1, c0:c1].clone(memory_format=torch.contiguous_format)


def _cut_rows(scale: Tensor, window: Window) -> Tensor:
    """Return the rows of per-channel scales: [.., N, 1], [.., N] or [N]."""
    axis = -1 if scale.shape[-1] != 1 or scale.dim() == 1 else -2
    if scale.shape[axis] != window.whole[0]:
        return scale
    return scale.narrow(axis, window.rows[0], window.rows[1] - window.rows[0]).clone()
