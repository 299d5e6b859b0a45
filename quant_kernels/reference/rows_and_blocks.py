"""FP8 with fp32 scales, one an output row (PTPC) or one a block of rows x columns, in plain torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quant_kernels.reference.rounding import (
    E4M3_MAX,
    E4M3FNUZ_MAX,
    TINY_SCALE,
    encode_e4m3,
    encode_e4m3fnuz,
    power_of_two,
)

BLOCK: Final = 128


def row_amax(weight: Tensor) -> Tensor:
    """Return the greatest magnitude of each row of a weight [.., N, K] as fp32 [.., N, 1]; NaN if a row holds one."""
    if weight.shape[-1] == 0:
        return weight.new_zeros((*weight.shape[:-1], 1), dtype=torch.float32)
    return weight.abs().amax(dim=-1, keepdim=True).float()


def block_amax(weight: Tensor, rows: int = BLOCK, cols: int = BLOCK) -> Tensor:
    """Return the greatest magnitude of each `rows` x `cols` tile of a weight [.., N, K].

    fp32 [.., ⌈N/rows⌉, ⌈K/cols⌉]. Edge tiles may be partial. NaN if a tile holds one.
    """
    n, k = weight.shape[-2:]
    tiles_n, tiles_k = -(-n // rows), -(-k // cols)
    if weight.numel() == 0:
        return weight.new_zeros((*weight.shape[:-2], tiles_n, tiles_k), dtype=torch.float32)
    padded = torch.nn.functional.pad(weight.abs(), (0, tiles_k * cols - k, 0, tiles_n * rows - n))
    tiles = padded.reshape(*weight.shape[:-2], tiles_n, rows, tiles_k, cols)
    greatest = tiles.amax(dim=(-3, -1)).float()
    return torch.where(greatest.isnan(), torch.nan, greatest)


def fp32_scale(amax: Tensor, greatest: float) -> Tensor:
    """Return RN(amax / greatest), at least 2^-126, and 1.0 where amax is zero; NaN stays (the positive quiet NaN)."""
    # A tensor divisor: dividing by a Python number multiplies by the reciprocal on some devices.
    scale = (amax / torch.full_like(amax, greatest)).clamp(min=TINY_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isnan(), torch.nan, scale)


def expand_blocks(scale: Tensor, rows: int, cols: int, shape: tuple[int, int]) -> Tensor:
    """Repeat block scales [.., R, C] over their elements: [.., N, K] for `shape` = (N, K)."""
    n, k = shape
    return scale.repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(cols, -1)[..., :k]


def quantize_ptpc_fp8(
    weight: Tensor,
    scale_rounding: str | None = None,  # noqa: ARG001  (one signature for all formats)
    *,
    amax: Tensor | None = None,
    fnuz: bool = False,
) -> tuple[Tensor, Tensor, None]:
    """Quantize a weight [.., N, K] with one fp32 scale an output row.

    Args:
        weight: float32, float16 or bfloat16.
        scale_rounding: ignored, scales are not powers of two.
        amax: fp32 [.., N, 1], greatest magnitudes to use instead of the weight's own.
        fnuz: use float8_e4m3fnuz (greatest value 240).

    Returns:
        Codes float8_e4m3fn [.., N, K], scales fp32 [.., N, 1], None.
    """
    greatest = E4M3FNUZ_MAX if fnuz else E4M3_MAX
    scale = fp32_scale(row_amax(weight) if amax is None else amax, greatest)
    ratio = weight.float() / scale
    return (encode_e4m3fnuz(ratio) if fnuz else encode_e4m3(ratio)), scale, None


def dequantize_ptpc_fp8(
    data: Tensor, scale: Tensor, second_scale: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return code x scale of FP8 [.., N, K] with scales [.., N, 1], rounded once to `dtype`."""
    del second_scale
    return (data.float() * scale).to(dtype)


def quantize_per_block_fp8(
    weight: Tensor,
    scale_rounding: str | None = None,  # noqa: ARG001  (one signature for all formats)
    *,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]:
    """Quantize a weight [.., N, K] with one fp32 scale a 128 x 128 tile; edge tiles may be partial.

    Args:
        weight: float32, float16 or bfloat16.
        scale_rounding: ignored, scales are not powers of two.
        amax: fp32 [.., ⌈N/128⌉, ⌈K/128⌉], greatest magnitudes to use instead of the weight's own.

    Returns:
        Codes float8_e4m3fn [.., N, K], scales fp32 [.., ⌈N/128⌉, ⌈K/128⌉], None.
    """
    n, k = weight.shape[-2:]
    scale = fp32_scale(block_amax(weight) if amax is None else amax, E4M3_MAX)
    ratio = weight.float() / expand_blocks(scale, BLOCK, BLOCK, (n, k))
    return encode_e4m3(ratio), scale, None


def dequantize_fp8_blocks(
    data: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    offset: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return code x scale of FP8 [.., N, K] with one scale a block, rounded once to `dtype`.

    Args:
        data: float8_e4m3fn (or FNUZ) codes.
        scale: fp32, or E8M0 (float8_e8m0fnu, uint8), [.., R, C].
        dtype: of the result.
        block: rows and columns that share a scale.
        offset: rows and columns between the first scale's block and the first element: a shard cut off the block grid.
    """
    factor = scale.float() if scale.dtype.is_floating_point and scale.dtype.itemsize > 1 else power_of_two(scale)
    n, k = data.shape[-2:]
    full = expand_blocks(factor, *block, (offset[0] + n, offset[1] + k))
    return (data.float() * full[..., offset[0] :, offset[1] :]).to(dtype)


def dequantize_per_block_fp8(
    data: Tensor, scale: Tensor, second_scale: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return code x scale of FP8 [.., N, K] with scales [.., ⌈N/128⌉, ⌈K/128⌉], rounded once to `dtype`."""
    del second_scale
    return dequantize_fp8_blocks(data, scale, dtype)
