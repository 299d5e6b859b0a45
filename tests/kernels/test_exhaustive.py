"""Codes of every bf16 and fp16 pattern against ml_dtypes, an implementation that shares nothing with this one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import quant_kernels as qk

DTYPES = (torch.bfloat16, torch.float16)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-32768, 32768).to(torch.int16).view(dtype)


def finite(dtype: torch.dtype) -> torch.Tensor:
    every = patterns(dtype)
    return torch.where(every.isfinite(), every, 0)


def e4m3(values: np.ndarray, greatest: float, dtype: type) -> np.ndarray:
    """RNE, saturating: ml_dtypes makes NaN of what is too large, so clamp first."""
    return np.clip(values, -greatest, greatest).astype(dtype).view(np.uint8)


def e2m1(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def pairs(packed: torch.Tensor) -> np.ndarray:
    """Codes one a byte, the low nibble first."""
    found = packed.cpu().view(torch.uint8).numpy()
    return np.stack((found & 15, found >> 4), axis=-1).reshape(*found.shape[:-1], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fnuz", [False, True])
def test_ptpc_codes_and_scales(dtype: torch.dtype, *, fnuz: bool, device: str) -> None:
    weight = finite(dtype).reshape(256, 256)
    q = qk.quantize(weight.to(device), "ptpc_fp8", fnuz=fnuz)
    values = weight.float().numpy()
    greatest = np.float32(240 if fnuz else 448)
    amax = np.abs(values).max(-1, keepdims=True)
    scale = np.where(amax == 0, np.float32(1), np.maximum(amax / greatest, np.float32(2.0**-126)))
    assert np.array_equal(q.scale.cpu().numpy(), scale)
    codes = e4m3(values / scale, float(greatest), ml_dtypes.float8_e4m3fnuz if fnuz else ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.data.cpu().view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_codes_under_every_kind_of_scale(dtype: torch.dtype, device: str) -> None:
    row = finite(dtype)
    exponents = np.arange(-110, 100, 7)
    amax = torch.from_numpy(np.float32(1.37) * np.exp2(exponents).astype(np.float32))
    q = qk.quantize(row.to(device).expand(len(amax), -1), "ptpc_fp8", amax=amax.unsqueeze(1).to(device))
    scale = (amax.numpy() / np.float32(448))[:, None]
    with np.errstate(over="ignore"):
        codes = e4m3(row.float().numpy() / scale, 448, ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.data.cpu().view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_microscaling_codes_under_every_scale(name: str, dtype: torch.dtype, device: str) -> None:
    """All patterns under all finite scale bytes: a given maximum with the exponent byte + emax, rounded by floor."""
    row = finite(dtype)
    emax = 2 if name == "mxfp4" else 8
    exponents = np.arange(emax, 255, 3 if name == "mxfp8" else 2)
    amax = torch.from_numpy((exponents.astype(np.uint32) << 23).view(np.float32))
    q = qk.quantize(
        row.to(device).expand(len(amax), -1),
        name,
        scale_rounding="floor",
        amax=amax.to(device).unsqueeze(1).expand(-1, row.numel() // 32),
    )
    byte = exponents - emax
    assert np.array_equal(q.scale.cpu().view(torch.uint8).numpy(), np.repeat(byte[:, None], row.numel() // 32, 1))
    with np.errstate(over="ignore"):
        scaled = (row.double().numpy()[None] * np.exp2(127.0 - byte)[:, None]).clip(-1e30, 1e30)
    # float64 holds every product exactly, and ml_dtypes rounds from it once.
    if name == "mxfp4":
        assert np.array_equal(pairs(q.data), e2m1(scaled))
    else:
        assert np.array_equal(q.data.cpu().view(torch.uint8).numpy(), e4m3(scaled, 448, ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rounding", ["even", "floor", "rceil"])
def test_scale_bytes_of_every_maximum(name: str, rounding: str, device: str) -> None:
    """The byte of every positive finite bf16 and a neighbourhood in fp32, by the definitions in exact arithmetic."""
    maxima = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16).float()
    near = torch.cat(
        (maxima, (maxima.view(torch.int32) + 1).view(torch.float32), (maxima.view(torch.int32) - 1).view(torch.float32))
    )
    near = torch.nn.functional.pad(near[near.isfinite()], (0, -int(near.isfinite().sum()) % 4))
    weight = torch.zeros(near.numel() // 4, 128)
    weight[:, ::32] = near.reshape(-1, 4)
    byte = qk.quantize(weight.to(device), name, scale_rounding=rounding).scale.cpu().view(torch.uint8).flatten()
    emax, mantissa, greatest = (2, 1, 6) if name == "mxfp4" else (8, 3, 448)
    value = near.double().numpy()
    with np.errstate(divide="ignore"):
        if rounding == "rceil":
            exponent = np.ceil(np.log2(value / greatest))
            # log2 may be off by an ulp: the smallest power of two that is at least value / greatest
            exponent = np.where(np.exp2(exponent - 1) * greatest >= value, exponent - 1, exponent)
            exponent = np.where(np.exp2(exponent) * greatest < value, exponent + 1, exponent)
        else:
            fraction, power = np.frexp(value)
            exponent = power - 1.0 - emax
            if rounding == "even":
                # the maximum rounded, half up, to the element's mantissa carries to the next power of two
                exponent += fraction * 2 >= 2 - 0.5 * 2.0**-mantissa
    wanted = np.where(value == 0, 0, np.clip(np.nan_to_num(exponent, neginf=-1e9) + 127, 0, 254))
    assert np.array_equal(byte.numpy(), wanted.astype(np.uint8))


def test_fp32_ties_below_bf16_precision(device: str) -> None:
    """fp32 is quantized from fp32: 0.25 + 2^-24 is no tie, as it would be through bf16."""
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([4.0, 0.25, 0.25 + 2.0**-24, -0.25 - 2.0**-24])
    codes = pairs(qk.quantize(weight.to(device), "mxfp4").data)
    assert codes[0, :4].tolist() == [6, 0, 1, 9]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_codes(dtype: torch.dtype, device: str) -> None:
    weight = (
        finite(dtype).reshape(1024, 64)
        if dtype is torch.float16
        else finite(dtype).clamp(-1e30, 1e30).reshape(1024, 64)
    )
    q = qk.quantize(weight.to(device), "nvfp4")
    values = weight.float().numpy()
    second = np.float32(np.abs(values).max() / np.float32(2688))
    assert q.second_scale.cpu().numpy() == second
    groups = values.reshape(1024, 4, 16)
    amax = np.abs(groups).max(-1)
    scale = e4m3((amax / np.float32(6)) / second, 448, ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.scale.cpu().view(torch.uint8).numpy(), scale)
    step = (scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * second)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step == 0, 0, e2m1(np.nan_to_num(groups / step, posinf=9, neginf=-9)))
    assert np.array_equal(pairs(q.data), codes.reshape(1024, 64))


@pytest.mark.parametrize("word", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_under_every_scale_dequantizes(word: str, dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256).to(torch.uint8).expand(255, 256).contiguous()
    groups = (512 if word == "mxfp4" else 256) // 32
    byte = torch.arange(255).to(torch.uint8).unsqueeze(1).expand(-1, groups).contiguous()
    element = torch.float4_e2m1fn_x2 if word == "mxfp4" else torch.float8_e4m3fn
    from quant_spec import QuantKey

    q = qk.QuantizedTensor(
        codes.view(element).to(device),
        byte.view(torch.float8_e8m0fnu).to(device),
        QuantKey.parse(word),
        (255, groups * 32),
    )
    values = (
        pairs(codes).view(ml_dtypes.float4_e2m1fn) if word == "mxfp4" else codes.numpy().view(ml_dtypes.float8_e4m3fn)
    ).astype(np.float64)
    exact = torch.from_numpy(values * np.exp2(np.arange(255)[:, None] - 127.0))
    # The product is exact in fp32 but for subnormal and too large ones, which round there first.
    wanted = exact.float().to(dtype)
    found = qk.dequantize(q, dtype).cpu()
    assert torch.equal(found.nan_to_num(nan=7), wanted.nan_to_num(nan=7))
    assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())
