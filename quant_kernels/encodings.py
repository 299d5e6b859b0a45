"""Encoded sources: how the codes and scales of a quantized weight are read, whatever its format is called.

Every source is a matrix of codes with one scale a block of rows x columns. MXFP8 is e4m3 in blocks of 1 x 32 with E8M0
scales, a per-channel weight has blocks of 1 x K, a per-tensor one of N x K. Kernels see this form alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.arguments import check_offset, check_shard_rows
from quant_kernels.checks import (
    KernelInputError,
    check_device,
    check_dtype,
    check_k,
    check_rank,
    check_shape,
)
from quant_spec.dtypes import E8M0
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant_spec import QuantKey

_FP8: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FP4: Final = (torch.float4_e2m1fn_x2, torch.uint8)
_E8M0: Final = (torch.float8_e8m0fnu, torch.uint8)
SUPPORTED: Final = "fp8_e4m3 and fp8_e4m3fnuz (per_tensor, per_channel, group_N, block_RxC), mxfp4, mxfp8, nvfp4"


@dataclass(frozen=True)
class Encoded:
    """A quantized weight as kernels read it.

    Attributes:
        data: float8_e4m3fn, float8_e4m3fnuz [.., N, K], or packed e2m1 as uint8 [.., N, K/2].
        scale: [.., R, C], fp32, E8M0 as uint8, or float8_e4m3fn (NVFP4).
        second: fp32 [..] for NVFP4, else None.
        block: rows and columns that share a scale.
        offset: position of the first element within the first block.
        shape: shape of the weight, in elements.
    """

    data: Tensor
    scale: Tensor
    second: Tensor | None
    block: tuple[int, int]
    offset: tuple[int, int]
    shape: tuple[int, ...]


def _leading(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[:-2])


def _per_tensor(
    scale: Tensor, shape: tuple[int, ...], shard_rows: Sequence[int] | None
) -> tuple[Tensor, tuple[int, int]]:
    lead, (n, k) = _leading(shape), shape[-2:]
    matrices = lead[0] if lead else 1
    if scale.numel() == 1:
        return scale.reshape((1,) * len(shape)).expand(*lead, 1, 1), (max(n, 1), max(k, 1))
    if scale.numel() == matrices and shard_rows is None:
        return scale.reshape(*lead, 1, 1), (max(n, 1), max(k, 1))
    shards = scale.numel() // max(matrices, 1)
    fits = shard_rows is not None and len(shard_rows) == shards and min(shard_rows) >= 0 and sum(shard_rows) == n
    if shard_rows is None or not fits or shards * matrices != scale.numel():
        found = f"{scale.numel()} scales, shard_rows {None if shard_rows is None else list(shard_rows)}"
        allowed = f"one scale, one a matrix ({matrices}), or one a shard with shard_rows that sum up to {n}"
        raise KernelInputError("scale", found, allowed)
    counts = torch.tensor(list(shard_rows), device=scale.device)
    per_row = scale.reshape(*lead, shards).repeat_interleave(counts, dim=-1, output_size=n)
    return per_row.unsqueeze(-1), (1, max(k, 1))


def _fp8(
    scale: Tensor,
    key: QuantKey,
    shape: tuple[int, ...],
    offset: tuple[int, int],
    shard_rows: Sequence[int] | None,
) -> tuple[Tensor, tuple[int, int]]:
    lead, (n, k) = _leading(shape), shape[-2:]
    granularity = key.scale.granularity
    if isinstance(granularity, PerTensor):
        return _per_tensor(scale, shape, shard_rows)
    if isinstance(granularity, PerChannel):
        if scale.numel() != n * (lead[0] if lead else 1):
            raise KernelInputError("scale", f"shape {list(scale.shape)}", f"{[*lead, n, 1]} or {[*lead, n]}")
        return scale.reshape(*lead, n, 1), (1, max(k, 1))
    if isinstance(granularity, PerGroup):
        block = (1, granularity.group_size)
    elif isinstance(granularity, PerBlock):
        block = (granularity.rows, granularity.cols)
    else:
        raise KernelInputError("source", str(key), SUPPORTED)
    rows, cols = (-(-(size + first) // step) for size, first, step in zip((n, k), offset, block, strict=True))
    check_shape("scale", scale, (*lead, rows, cols))
    return scale, block


def _group_format(key: QuantKey) -> str:
    """Return the name of a format whose word fixes everything, else an empty text. Compares parts: no text is built."""
    granularity = key.scale.granularity
    if not isinstance(granularity, PerGroup):
        return ""
    # A copy of a key, as models that are copied or sent to another process have it, holds a copy of E8M0.
    powers = key.scale.dtype is E8M0 or key.scale.dtype == E8M0
    parts = (key.element.name, granularity.group_size, powers, key.second_scale is not None)
    return {
        ("fp4_e2m1", 32, True, False): "mxfp4",
        ("fp8_e4m3", 32, True, False): "mxfp8",
        ("fp4_e2m1", 16, False, True): "nvfp4",
    }.get(parts, "")


def encode_source(
    data: Tensor,
    scale: Tensor,
    key: QuantKey,
    *,
    second_scale: Tensor | None = None,
    offset: tuple[int, int] = (0, 0),
    shard_rows: Sequence[int] | None = None,
) -> Encoded:
    """Return a quantized weight in the form that kernels read.

    Args:
        data: codes [.., N, K] (4-bit: [.., N, K/2]).
        scale: scales as the format stores them; E8M0 scales may be uint8. Per tensor: one, one a matrix or one a shard.
        key: format of the codes. `fp8_e4m3/...` scales may be fp32 or E8M0, whatever the key says.
        second_scale: NVFP4: fp32, one for all or one a matrix.
        offset: for block scales, row and column of the first element within the first block.
        shard_rows: rows of each shard of a fused weight with one scale a shard.

    Raises:
        KernelInputError: a dtype, shape or device does not fit the format.
    """
    check_rank("data", data)
    check_device("scale", scale, data.device)
    offset, shard_rows = check_offset(offset), check_shard_rows(shard_rows)
    name = _group_format(key)
    if name in ("mxfp4", "nvfp4"):
        check_dtype("data", data, _FP4)
        shape = (*data.shape[:-1], 2 * data.shape[-1])
        group = 32 if name == "mxfp4" else 16
        check_k("data", shape[-1], group, name)
        check_dtype("scale", scale, _E8M0 if name == "mxfp4" else (torch.float8_e4m3fn,))
        check_shape("scale", scale, (*shape[:-1], shape[-1] // group))
        scale = scale.view(torch.uint8) if name == "mxfp4" else scale
        second = _second(second_scale, shape, data.device) if name == "nvfp4" else None
        return Encoded(data.view(torch.uint8), scale, second, (1, group), (0, 0), shape)
    shape = tuple(data.shape)
    if name == "mxfp8":
        check_dtype("data", data, (torch.float8_e4m3fn,))
        check_k("data", shape[-1], 32, name)
        check_dtype("scale", scale, _E8M0)
        check_shape("scale", scale, (*shape[:-1], shape[-1] // 32))
        return Encoded(data, scale.view(torch.uint8), None, (1, 32), (0, 0), shape)
    if key.element.name not in ("fp8_e4m3", "fp8_e4m3fnuz") or key.second_scale is not None:
        raise KernelInputError("source", str(key), SUPPORTED)
    check_dtype("data", data, _FP8[1:] if key.element.name == "fp8_e4m3fnuz" else _FP8[:1])
    check_dtype("scale", scale, (torch.float32, torch.bfloat16, torch.float16, *_E8M0))
    if scale.dtype in _E8M0:
        scale = scale.view(torch.uint8)
    elif scale.dtype is not torch.float32:
        scale = scale.float()
    expanded, block = _fp8(scale, key, shape, offset, shard_rows)
    return Encoded(data, expanded, None, block, offset, shape)


def _second(second: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    lead = _leading(shape)
    if second is None:
        return torch.ones(lead, device=device)
    check_device("second_scale", second, device)
    check_dtype("second_scale", second, (torch.float32,))
    matrices = lead[0] if lead else 1
    if second.numel() not in (1, matrices):
        raise KernelInputError(
            "second_scale", f"shape {list(second.shape)}", f"one value, or one a matrix ({matrices})"
        )
    return second.reshape(lead) if second.numel() == matrices else second.reshape(()).expand(lead)
