"""The compiled kernels against plain torch, bit for bit: every format, dtype, shape and stride, on every device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import quant_kernels as qk
from quant_spec import get_format

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
ROUNDED = [(name, rounding) for name in FORMATS for rounding in (get_format(name).scale_roundings or (None,))]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of a 16-bit dtype in order of size, 65,536 random ones of fp32."""
    if dtype is torch.float32:
        words = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
        return words.to(torch.int32).view(dtype)
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@functools.cache
def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights that take every path: aligned and not, few and many columns, stacks, strides, odd values."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    every = patterns(dtype)
    shuffled = every[torch.randperm(every.numel(), generator=generator)]
    long_rows = normal(2, 20000) * torch.logspace(-20, 20, 20000)
    return {
        "all patterns": every.reshape(-1, 256),
        "all patterns shuffled": shuffled.reshape(-1, 512),
        "finite patterns": torch.where(every.isfinite(), every, 0).to(dtype).reshape(64, -1),
        "one row": normal(1, 96).to(dtype),
        "one element a row": normal(7, 1).to(dtype),
        "stack": normal(3, 130, 160).to(dtype),
        "stack of few rows": normal(5, 2, 2112).to(dtype),
        "narrow": normal(513, 192).to(dtype),
        "2048": normal(9, 2048).to(dtype),
        "4096": normal(5, 4096).to(dtype),
        "7168": normal(3, 7168).to(dtype),
        "12288": normal(3, 12288).to(dtype),
        "ragged": normal(200, 333).to(dtype),
        "long rows": long_rows.to(dtype),
        "65536": normal(1, 65536).to(dtype),
        "tiny": (normal(7, 64) * 1e-38).to(dtype),
        "large": (normal(7, 64) * 1e4).to(dtype) * (1e30 if dtype is not torch.float16 else 1),
        "zero": torch.zeros(3, 64, dtype=dtype),
        "minus zero": -torch.zeros(3, 64, dtype=dtype),
        "unaligned": normal(64 * 200 + 1).to(dtype)[1:].reshape(64, 200)[:, 3:99],
        "padded rows": normal(64, 256).to(dtype)[:, :96],
        "padded stack": normal(3, 70, 256).to(dtype)[:, :64, 32:160],
        "transposed": normal(64, 40).to(dtype).t(),
        "every second": normal(40, 128).to(dtype)[:, ::2],
        "expanded": normal(1, 64).to(dtype).expand(33, 64),
    }


NAMES = list(weights(torch.bfloat16))


def fits(name: str, weight: torch.Tensor) -> bool:
    return get_format(name).check_k(weight.shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_quantize_and_dequantize(
    name: str, dtype: torch.dtype, device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    weight = weights(dtype)[name]
    moved = (
        weight.to(device)
        if device == "cpu"
        else torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=device).copy_(weight)
        if name != "expanded"
        else weight[:1].to(device).expand(weight.shape)
    )
    for format_name, rounding in ROUNDED:
        if not fits(format_name, weight):
            continue
        wanted = reference(qk.quantize, weight, format_name, scale_rounding=rounding)
        found = qk.quantize(moved, format_name, scale_rounding=rounding)
        same(found, wanted)
        for out in DTYPES:
            same(qk.dequantize(found, out), reference(qk.dequantize, wanted, out))
    same(qk.quantize(moved, "ptpc_fp8", fnuz=True), reference(qk.quantize, weight, "ptpc_fp8", fnuz=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["row", "1x16", "1x32", "128x128", "tensor"])
def test_amax(
    granularity: str, dtype: torch.dtype, device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    for weight in weights(dtype).values():
        group = int(granularity[2:]) if granularity.startswith("1x") else 1
        if weight.shape[-1] % group:
            continue
        same(qk.amax(weight.to(device), granularity), reference(qk.amax, weight, granularity))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_with_given_maxima(
    dtype: torch.dtype, device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 130, 288, generator=generator).to(dtype)
    weight[0, 0, 0], weight[1, 5, 7], weight[1, 6, 9] = torch.nan, torch.inf, -torch.inf
    for format_name, granularity in (
        ("ptpc_fp8", "row"), ("mxfp4", "1x32"), ("mxfp8", "1x32"), ("per_block_fp8", "128x128"), ("nvfp4", "tensor"),
    ):  # fmt: skip
        amax = torch.rand(qk.amax(weight, granularity).shape, generator=generator) * 3
        wanted = reference(qk.quantize, weight, format_name, amax=amax)
        same(qk.quantize(weight.to(device), format_name, amax=amax.to(device)), wanted)


def test_own_maxima_given_change_nothing(device: str, same: Callable[..., None]) -> None:
    weight = torch.randn(3, 130, 288, generator=torch.Generator().manual_seed(4)).to(device)
    for format_name, granularity in (
        ("ptpc_fp8", "row"), ("mxfp4", "1x32"), ("mxfp8", "1x32"), ("per_block_fp8", "128x128"), ("nvfp4", "tensor"),
    ):  # fmt: skip
        amax = qk.amax(weight, granularity)
        same(qk.quantize(weight, format_name, amax=amax), qk.quantize(weight, format_name))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 256), (2, 48, 704), (3, 272, 512)])
def test_cdna_order(
    format_name: str, shape: tuple[int, ...], device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    wanted = reference(qk.quantize, weight, format_name, layout="cdna")
    same(qk.quantize(weight.to(device), format_name, layout="cdna"), wanted)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 256), (2, 200, 352), (1, 16384)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_sums(
    format_name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, reference: Callable[..., Any]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    found = qk.quantize(weight.to(device), format_name, measure=True)
    wanted = reference(qk.quantize, weight, format_name, measure=True)
    torch.testing.assert_close(found.error_sums.cpu(), wanted.error_sums, rtol=1e-5, atol=0)
    assert found.sqnr_db == pytest.approx(wanted.sqnr_db, abs=1e-3)


def test_work_list_is_each_weight_alone(device: str, same: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(5, 512), (3, 64, 256), (1, 2048), (130, 192), (16, 4096), (2, 7, 32), *[(n, 64) for n in range(1, 12)]]
    weights_ = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    for format_name in FORMATS:
        for found, weight in zip(qk.quantize_many(weights_, format_name), weights_, strict=True):
            same(found, qk.quantize(weight, format_name))
