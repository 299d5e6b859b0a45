"""Bad input: an error that names the argument, what was found and what is allowed, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quant_kernels as qk
from quant_kernels.checks import KernelInputError
from quant_spec import ConfigError

BF16 = torch.bfloat16


def weight(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape or (32, 64), dtype=dtype)


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown format 'mxfp5'.*did you mean 'mxfp[48]'"):
        qk.quantize(weight(), "mxfp5")


QUANTIZE: list[tuple[dict[str, Any], str]] = [
    ({"w": weight(64)}, r"^w: found 1 dimensions \[64\]; allowed: 2 \[N, K\] or 3 \[E, N, K\] dimensions$"),
    ({"w": weight(1, 2, 3, 4)}, r"^w: found 4 dimensions"),
    ({"w": weight().to(torch.int8)}, r"^w: found dtype int8; allowed: float32, float16, bfloat16$"),
    ({"w": weight().double()}, r"^w: found dtype float64"),
    ({"w": weight(32, 48)}, r"^w: found K = 48; allowed: a multiple of 32 for mxfp4$"),
    ({"w": weight(32, 40), "format": "nvfp4"}, r"^w: found K = 40; allowed: a multiple of 16 for nvfp4$"),
    ({"scale_rounding": "evn"}, r"^scale_rounding: found 'evn'; allowed: even, floor, rceil; did you mean 'even'\?$"),
    ({"scale_rounding": "even", "format": "ptpc_fp8"}, r"^scale_rounding: found 'even'; allowed: None for ptpc_fp8$"),
    ({"layout": "cdma"}, r"^layout: found 'cdma'; allowed: row_major, cdna; did you mean 'cdna'\?$"),
    ({"w": weight(24, 64), "layout": "cdna"}, r"^w: found N = 24; allowed: a multiple of 16 for the cdna layout$"),
    ({"w": weight(32, 32), "layout": "cdna"}, r"^w: found K = 16; allowed: a multiple of 32 for the cdna layout"),
    ({"fnuz": True}, r"^fnuz: found True; allowed: False for mxfp4"),
    ({"amax": torch.ones(32, 1)}, r"^amax: found shape \[32, 1\]; allowed: \[32, 2\]$"),
    ({"amax": torch.ones(32, 2, dtype=BF16)}, r"^amax: found dtype bfloat16; allowed: float32$"),
    ({"format": "int8_per_channel"}, r"^format: found 'int8_per_channel'; allowed: one with a conversion: ptpc_fp8"),
]


@pytest.mark.parametrize(("arguments", "message"), QUANTIZE)
def test_quantize_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message) as caught:
        qk.quantize(**{"w": weight(), "format": "mxfp4", **arguments})
    assert str(caught.value).startswith(caught.value.argument)


def destination(**changed: object) -> qk.QuantizedTensor:
    q = qk.quantize(weight(), "mxfp4")
    parts = {"data": q.data, "scale": q.scale, "key": q.key, "shape": q.shape, **changed}
    return qk.QuantizedTensor(**parts)


OUT = [
    ({"data": torch.empty(32, 64, dtype=torch.uint8)}, r"^out\.data: found shape \[32, 64\]; allowed: \[32, 32\]$"),
    ({"data": torch.empty(32, 32)}, r"^out\.data: found dtype float32; allowed: float4_e2m1fn_x2, uint8$"),
    ({"scale": torch.empty(32, 4, dtype=torch.uint8)[:, ::2]}, r"^out\.scale: found stride 2 along its last side"),
    ({"data": torch.empty(1, 32, dtype=torch.uint8).expand(32, 32)}, r"^out\.data: found strides \[0, 1\]"),
]


@pytest.mark.parametrize(("changed", "message"), OUT)
def test_destinations_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        qk.quantize(weight(), "mxfp4", out=destination(**changed))


def test_overlapping_destination_is_refused_and_left_alone() -> None:
    source = weight()
    before = source.clone()
    inside = source.view(torch.uint8).flatten()[: 32 * 32].view(32, 32)
    with pytest.raises(KernelInputError, match=r"^out\.data: found memory shared with the source"):
        qk.quantize(source, "mxfp4", out=destination(data=inside))
    assert torch.equal(source, before)
    shared = torch.empty(32 * 32 + 32 * 2 - 1, dtype=torch.uint8)
    parts = {"data": shared[: 32 * 32].view(32, 32), "scale": shared[32 * 32 - 1 :].view(32, 2)}
    with pytest.raises(KernelInputError, match=r"^out\.data: found memory shared with out\.scale"):
        qk.quantize(source, "mxfp4", out=destination(**parts))


FP8 = torch.ones(200, 256).to(torch.float8_e4m3fn)
REQUANTIZE: list[tuple[dict[str, Any], str]] = [
    ({"scale": torch.ones(1, 2)}, r"^scale: found shape \[1, 2\]; allowed: \[2, 2\]$"),
    ({"offset": (60, 0)}, r"^scale: found shape \[2, 2\]; allowed: \[3, 2\]$"),
    ({"offset": (-1, 0)}, r"^offset: found \(-1, 0\); allowed: two whole numbers that are not negative$"),
    ({"data": torch.ones(200, 256)}, r"^data: found dtype float32; allowed: float8_e4m3fn$"),
    ({"scale": torch.ones(2, 2, dtype=torch.int32)}, r"^scale: found dtype int32; allowed: float32"),
    ({"source": "int4/group_128"}, r"^source: found int4/group_128; allowed: fp8_e4m3"),
    ({"source": "fp8_e4m3/per_channel"}, r"^scale: found shape \[2, 2\]; allowed: \[200, 1\] or \[200\]$"),
    ({"source": "fp8_e4m3/per_tensor", "scale": torch.ones(3)}, r"^scale: found 3 scales, shard_rows None; allowed"),
    ({"source": "mxfp8"}, r"^scale: found dtype float32; allowed: float8_e8m0fnu, uint8$"),
    ({"through": torch.int8}, r"^through: found dtype int8; allowed: float32, float16, bfloat16$"),
]


@pytest.mark.parametrize(("arguments", "message"), REQUANTIZE)
def test_requantize_refuses(arguments: dict[str, Any], message: str) -> None:
    whole = {"data": FP8, "scale": torch.ones(2, 2), "source": "fp8_e4m3/block_128x128", "target": "ptpc_fp8"}
    with pytest.raises(KernelInputError, match=message):
        qk.requantize(**{**whole, **arguments})


def test_amax_and_dequantize_refuse() -> None:
    with pytest.raises(KernelInputError, match=r"^granularity: found 'rows'; .*did you mean 'row'"):
        qk.amax(weight(), "rows")
    with pytest.raises(KernelInputError, match=r"^dtype: found dtype float64"):
        qk.dequantize(destination(), torch.float64)
    with pytest.raises(KernelInputError, match=r"^q\.shape: found \[32, 128\]; allowed: \[32, 64\]"):
        qk.dequantize(destination(shape=(32, 128)))
    with pytest.raises(KernelInputError, match=r"^out: found shape"):
        qk.dequantize(destination(), out=torch.empty(3, 3, dtype=BF16))


def test_work_lists_are_of_one_kind() -> None:
    with pytest.raises(KernelInputError, match=r"^weights\[1\]: found dtype float32; allowed: bfloat16$"):
        qk.quantize_many([weight(), weight(dtype=torch.float32)], "mxfp4")
    assert qk.quantize_many([], "mxfp4") == []
