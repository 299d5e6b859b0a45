"""Computes the linear product of checked operands: which way, and the way by tiles of the weight."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.activations import MXFP4, MXFP8, PER_TOKEN, round_activation
from quant_kernels.encodings import Encoded
from quant_kernels.launch import run_dense
from quant_kernels.library import native_on

if TYPE_CHECKING:
    from collections.abc import Iterator

# A dequantized tile is read back from a GPU's cache; on a CPU every tile costs two more meetings of all threads.
_TILE_BYTES: Final = 32 << 20
_ROW_STEP: Final = 128
# What the kernel does with an activation; the same numbers as `enum Activation` of csrc/linear.h.
_KERNEL_ACTIVATIONS: Final = {"": 0, PER_TOKEN: 1, MXFP8: 2, MXFP4: 3}
_CHOSEN_BY_LAUNCHER: Final = (0, 0)


def weight_tiles(weight: Encoded, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of a weight as slices with their values in `dtype`, a bounded number of bytes at a time.

    The tensor of one step is overwritten by the next: a whole weight is never dequantized at once unless it is small.
    """
    n, k = weight.shape
    if not n:
        return
    step = max(1, _TILE_BYTES // max(1, k * dtype.itemsize))
    if weight.block[0] < n:
        unit = max(_ROW_STEP, weight.block[0])
        step = max(weight.block[0], step // unit * unit)
    step = min(step, n)
    buffer = torch.empty((step, k), dtype=dtype, device=weight.data.device)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        tile = buffer[: rows.stop - start]
        run_dense([(_rows(weight, rows), tile)], dtype)
        yield rows, tile


def _rows(weight: Encoded, rows: slice) -> Encoded:
    """Return some rows of a weight; the first lies on the grid of its scales."""
    n, k = weight.shape
    high = weight.block[0]
    scale = weight.scale if high >= n else weight.scale[rows.start // high : -(-rows.stop // high)]
    return Encoded(weight.data[rows], scale, weight.second, weight.block, (0, 0), (rows.stop - rows.start, k))


def run_linear(x: Tensor, weight: Encoded, bias: Tensor | None, activation: str, out: Tensor) -> None:
    """Write x · weightᵀ + bias to `out` [.., N], of the dtype of `x`. Arguments were checked before."""
    n, k = weight.shape
    if not out.numel():
        return
    if not k:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        return
    flat = x.reshape(-1, k)
    target = out.view(-1, n) if out.is_contiguous() else torch.empty((flat.shape[0], n), dtype=x.dtype, device=x.device)
    if not _by_kernel(flat, weight, bias, activation, target):
        _by_tiles(round_activation(flat, activation), weight, bias, target)
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))


@functools.cache
def _kernel_built() -> bool:
    return hasattr(torch.ops.quant_kernels, "_linear")


def _by_kernel(x: Tensor, weight: Encoded, bias: Tensor | None, activation: str, out: Tensor) -> bool:
    """Multiply a few rows in one launch, the activation's quantization included; False if there is no kernel for it."""
    if x.device.type != "cuda" or activation not in _KERNEL_ACTIVATIONS:
        return False
    if weight.second is not None or not native_on("cuda") or not _kernel_built():
        return False
    bias = None if bias is None else bias.to(x.dtype)
    options = [_KERNEL_ACTIVATIONS[activation], *_CHOSEN_BY_LAUNCHER]
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return bool(torch.ops.quant_kernels._linear(x, weight.data, weight.scale, bias, out, options, stream))  # noqa: SLF001


def _by_tiles(x: Tensor, weight: Encoded, bias: Tensor | None, out: Tensor) -> None:
    """Dequantize tiles of rows to the dtype of `x` and multiply."""
    bias = None if bias is None else bias.to(x.dtype)
    for rows, tile in weight_tiles(weight, x.dtype):
        if bias is None:
            torch.mm(x, tile.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, tile.t(), out=out[:, rows])
