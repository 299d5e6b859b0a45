"""MXFP4, MXFP8 and NVFP4: formats with one small scale a run of 32 or 16 elements along K, in plain torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quant_kernels.reference.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    encode_e2m1,
    encode_e4m3,
    grouped,
    inverse_power_of_two,
    pack_e2m1,
    power_of_two,
    power_of_two_bytes,
    unpack_e2m1,
)

MX_GROUP: Final = 32
NVFP4_GROUP: Final = 16


def group_amax(weight: Tensor, group: int) -> Tensor:
    """Return the greatest magnitude of each run of `group` elements of [.., N, K] as fp32 [.., N, K/group]."""
    if weight.numel() == 0:
        shape = (*weight.shape[:-1], weight.shape[-1] // group)
        return weight.new_zeros(shape, dtype=torch.float32)
    return grouped(weight.abs(), group).amax(dim=-1).float()


def tensor_amax(weight: Tensor) -> Tensor:
    """Return the greatest magnitude of each matrix of [.., N, K] as fp32 [..] (0-d for a 2-D weight)."""
    if weight.numel() == 0:
        return weight.new_zeros(weight.shape[:-2], dtype=torch.float32)
    return weight.abs().amax(dim=(-2, -1)).float()


def _scaled_by_bytes(weight: Tensor, byte: Tensor) -> Tensor:
    groups = grouped(weight.float(), MX_GROUP)
    return (groups * inverse_power_of_two(byte).unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(
    weight: Tensor, scale_rounding: str | None = None, *, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, None]:
    """Quantize a weight [.., N, K], K a multiple of 32, to e2m1 with one E8M0 scale a run of 32.

    Args:
        weight: float32, float16 or bfloat16.
        scale_rounding: `even` (None means it), `floor` or `rceil`.
        amax: fp32 [.., N, K/32], greatest magnitudes to use instead of the weight's own.

    Returns:
        Codes float4_e2m1fn_x2 [.., N, K/2], scales float8_e8m0fnu [.., N, K/32], None.
    """
    found = group_amax(weight, MX_GROUP) if amax is None else amax
    byte = power_of_two_bytes(found, 4, scale_rounding or "even")
    codes = encode_e2m1(_scaled_by_bytes(weight, byte))
    return pack_e2m1(codes), byte.view(torch.float8_e8m0fnu), None


def dequantize_mxfp4(
    data: Tensor, scale: Tensor, second_scale: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return code x scale of packed e2m1 [.., N, K/2] with E8M0 scales [.., N, K/32], rounded once to `dtype`."""
    del second_scale
    groups = grouped(unpack_e2m1(data), MX_GROUP)
    return (groups * power_of_two(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_mxfp8(
    weight: Tensor, scale_rounding: str | None = None, *, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, None]:
    """Quantize a weight [.., N, K], K a multiple of 32, to e4m3 with one E8M0 scale a run of 32.

    Args:
        weight: float32, float16 or bfloat16.
        scale_rounding: `rceil` (None means it), `even` or `floor`.
        amax: fp32 [.., N, K/32], greatest magnitudes to use instead of the weight's own.

    Returns:
        Codes float8_e4m3fn [.., N, K], scales float8_e8m0fnu [.., N, K/32], None.
    """
    found = group_amax(weight, MX_GROUP) if amax is None else amax
    byte = power_of_two_bytes(found, 8, scale_rounding or "rceil")
    return encode_e4m3(_scaled_by_bytes(weight, byte)), byte.view(torch.float8_e8m0fnu), None


def dequantize_mxfp8(
    data: Tensor, scale: Tensor, second_scale: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return code x scale of e4m3 [.., N, K] with E8M0 scales [.., N, K/32], rounded once to `dtype`."""
    del second_scale
    groups = grouped(data.float(), MX_GROUP)
    return (groups * power_of_two(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_nvfp4(
    weight: Tensor,
    scale_rounding: str | None = None,  # noqa: ARG001  (one signature for all formats)
    *,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight [.., N, K], K a multiple of 16, to e2m1 with e4m3 scales under one fp32 scale a matrix.

    Args:
        weight: float32, float16 or bfloat16.
        scale_rounding: ignored, scales are not powers of two.
        amax: fp32 [..] (0-d for 2-D), the greatest magnitude that the second scale is made from: of all shards of a
            fused weight, for example.

    Returns:
        Codes float4_e2m1fn_x2 [.., N, K/2], scales float8_e4m3fn [.., N, K/16], second scale fp32 [..]. A second
        scale of 0 belongs to a matrix of zeros.
    """
    found = tensor_amax(weight) if amax is None else amax
    second = found / torch.full_like(found, E2M1_MAX * E4M3_MAX)
    second = torch.where(second.isnan(), torch.nan, second)
    blocks = group_amax(weight, NVFP4_GROUP)
    ratio = (blocks / torch.full_like(blocks, E2M1_MAX)) / second[..., None, None]
    scale = encode_e4m3(torch.where(blocks == 0, 0.0, ratio))
    step = (scale.float() * second[..., None, None]).unsqueeze(-1)
    groups = grouped(weight.float(), NVFP4_GROUP)
    codes = torch.where(step == 0, 0, encode_e2m1(groups / step)).to(torch.uint8)
    return pack_e2m1(codes.flatten(-2)), scale, second


def dequantize_nvfp4(
    data: Tensor, scale: Tensor, second_scale: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return code x RN(scale x second scale) of packed e2m1 [.., N, K/2], rounded once to `dtype`.

    Scales are e4m3 [.., N, K/16]; the second scale is fp32 [..] or None for 1.
    """
    step = scale.float()
    if second_scale is not None:
        step = step * second_scale.float().reshape(*second_scale.shape[: data.dim() - 2], 1, 1)
    groups = grouped(unpack_e2m1(data), NVFP4_GROUP)
    return (groups * step.unsqueeze(-1)).flatten(-2).to(dtype)
