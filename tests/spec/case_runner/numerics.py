"""Cases about values: `op`, `input` and `expect`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quant_kernels import QuantizedTensor, dequantize, quantize
from quant_spec import LoadError, get_format

GROUP = 32


def run_numeric(data: dict[str, Any]) -> None:
    """Run one case of `numerics/`."""
    run = {
        "decode_e8m0": decode_e8m0,
        "e4m3fn_to_e4m3fnuz": fn_to_fnuz,
        "quantize_ptpc_fp8": ptpc,
        "quantize_mxfp4": mxfp4,
    }[data["op"]]
    error = data.get("expect_error")
    if error is None:
        run(data["input"], data["expect"])
        return
    with pytest.raises(LoadError) as raised:
        run(data["input"], {})
    missing = [text for text in error.get("must_name") or () if text.lower() not in str(raised.value).lower()]
    assert not missing, f"the message does not name {missing}: {raised.value}"


def number(value: object) -> float:
    if isinstance(value, dict):
        return math.ldexp(1.0, value["pow2"])
    return float(value)  # type: ignore[arg-type]  # also "nan" and "inf"


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


def decode_e8m0(given: dict[str, Any], expect: dict[str, Any]) -> None:
    codes = torch.tensor(given["codes"], dtype=torch.uint8)
    ones = torch.full((len(codes), GROUP), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = codes.reshape(-1, 1).view(torch.float8_e8m0fnu)
    weight = QuantizedTensor(ones, scale, get_format("mxfp8").weight, (len(codes), GROUP))
    found = dequantize(weight, torch.float32)[:, 0].tolist()
    wrong = [(a, b) for a, b in zip(found, map(number, expect["values"]), strict=True) if not same(a, b)]
    assert not wrong, wrong


def fn_to_fnuz(given: dict[str, Any], expect: dict[str, Any]) -> None:
    from quant_kernels import e4m3fn_to_e4m3fnuz

    codes = torch.tensor([int(byte, 16) for byte in given["bytes"]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    data, scale = e4m3fn_to_e4m3fnuz(codes, torch.tensor(given["scale"], dtype=torch.float32))
    assert data.dtype == torch.float8_e4m3fnuz
    assert data.view(torch.uint8).tolist() == [int(byte, 16) for byte in expect["bytes"]]
    assert scale.item() == expect["scale"]
    assert (data.float() * scale).tolist() == expect["dequantized"]


def ptpc(given: dict[str, Any], expect: dict[str, Any]) -> None:
    weight = torch.tensor([[number(value) for value in row] for row in given["weight"]], dtype=torch.float32)
    made = quantize(weight, "ptpc_fp8", check=True, name=given.get("name") or "w")
    for found, expected in zip(made.scale.flatten().tolist(), expect.get("row_scale") or [], strict=False):
        if expected == "finite_positive":
            assert math.isfinite(found)
            assert found > 0
        else:
            assert found == pytest.approx(expected, rel=1e-6)
    if "row_scale" in expect:
        assert made.scale.numel() == len(expect["row_scale"])
    if "dequantized" in expect:
        assert dequantize(made, torch.float32).tolist() == expect["dequantized"]


def mxfp4(given: dict[str, Any], expect: dict[str, Any]) -> None:
    if "block" in given:
        block = [number(value) for value in given["block"]]
        weight = torch.tensor([block + [0.0] * (GROUP - len(block))], dtype=torch.float32)
    else:
        weight = torch.zeros(given["shape"], dtype=torch.float32)
        for row, column, value in given["nonzero"]:
            weight[row, column] = number(value)
    made = quantize(weight, "mxfp4", check=True, name=given.get("name") or "w")
    back = dequantize(made, torch.float32)
    if "scale_code" in expect:
        least, greatest = expect["scale_code"]
        assert least <= int(made.scale.view(torch.uint8)[0, 0]) <= greatest
    if expect.get("all_finite"):
        assert bool(torch.isfinite(back).all())
    if expect.get("signs_kept"):
        assert torch.equal(torch.signbit(back), torch.signbit(weight))
    if "nonzero" in expect:
        wanted = torch.zeros_like(back)
        for row, column, value in expect["nonzero"]:
            wanted[row, column] = number(value)
        assert torch.equal(back, wanted)
