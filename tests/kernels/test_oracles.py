"""Other projects' conversions: equal where they are right, different where they are known not to be.

Each known disagreement is asserted, so that a change of the other project is noticed here.
"""

from __future__ import annotations

import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import quant_kernels as qk


def spread(dtype: torch.dtype) -> torch.Tensor:
    """Weights of sizes from 1e-20 to 1e20 with ties, minus zeros and repeated maxima."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator) * torch.logspace(-20, 20, 256).unsqueeze(1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -0.0, 7.0]).repeat(43)[:512]
    return torch.cat((weight, ties.expand(4, -1) * torch.tensor([1.0, 2.0, 0.5, 4.0]).unsqueeze(1))).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        modes = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    return SimpleNamespace(to_mx=mx.to_mx, modes={mode.name.lower(): mode for mode in modes})


ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["even", "floor", "rceil"])
@pytest.mark.parametrize("name", list(ELEMENTS))
def test_torchao_agrees(name: str, rounding: str, dtype: torch.dtype, torchao: SimpleNamespace) -> None:
    weight = spread(dtype)
    scale, data = torchao.to_mx(weight, ELEMENTS[name], 32, torchao.modes[rounding])
    q = qk.quantize(weight, name, scale_rounding=rounding)
    assert torch.equal(raw(q.scale), raw(scale))
    assert torch.equal(raw(q.data), raw(data))


def test_torchao_scales_byte_0_by_its_neighbour(torchao: SimpleNamespace) -> None:
    """0.18 divides a block of byte 0 by 2^-126, not 2^-127: 2^-126 becomes code 2 (1.0), not 4 (2.0)."""
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, 0] = 2.0**-126
    scale, data = torchao.to_mx(weight, ELEMENTS["mxfp4"], 32, torchao.modes["even"])
    q = qk.quantize(weight, "mxfp4")
    assert raw(q.scale).item() == raw(scale).item() == 0
    assert (raw(q.data)[0].item(), raw(data)[0].item()) == (4, 2)
    assert qk.dequantize(q)[0, 0] == weight[0, 0]


@pytest.mark.parametrize(("name", "found"), [("mxfp4", 253), ("mxfp8", 247)])
def test_torchao_gives_infinite_blocks_a_number(name: str, found: int, torchao: SimpleNamespace) -> None:
    weight = torch.ones(1, 32, dtype=torch.bfloat16)
    weight[0, 3] = torch.inf
    scale, _ = torchao.to_mx(weight, ELEMENTS[name], 32, torchao.modes["even"])
    assert raw(scale).item() == found
    assert raw(qk.quantize(weight, name, scale_rounding="even").scale).item() == 255


@pytest.fixture(scope="module")
def ct() -> ModuleType:
    return pytest.importorskip("compressed_tensors")


def ct_arguments(**changed: object) -> Any:  # noqa: ANN401  (another project's class)
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(type="float", symmetric=True, **changed)


def test_compressed_tensors_agrees_on_mxfp4(ct: ModuleType) -> None:
    del ct
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    weight = spread(torch.bfloat16)[20:]  # its log2 of the smallest scales is taken in bf16
    byte = generate_mx_scales(qk.amax(weight, "1x32").to(torch.float32)).to(torch.uint8)
    assert torch.equal(raw(qk.quantize(weight, "mxfp4").scale), raw(byte))


def test_compressed_tensors_rounds_mxfp8_maxima_as_if_they_were_fp4(ct: ModuleType) -> None:
    """Its threshold is 1.75 for every element type: maxima from 1.75 to 1.9375 get the next scale."""
    del ct
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    amax = qk.amax(weight, "1x32")
    byte = generate_mx_scales(amax, num_bits=8).to(torch.uint8)
    ours = qk.quantize(weight, "mxfp8", scale_rounding="even").scale.view(torch.uint8)
    mantissa = torch.frexp(amax).mantissa * 2
    between = (mantissa >= 1.75) & (mantissa < 1.9375)
    assert between.any()
    assert torch.equal(ours != byte, between)
    assert torch.equal(byte[between], ours[between] + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors_agrees_on_ptpc_but_for_minus_zero(dtype: torch.dtype, ct: ModuleType) -> None:
    """It adds a zero point of 0, by which -0 becomes +0."""
    del ct
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    arguments = ct_arguments(num_bits=8, strategy="channel")
    weight = spread(dtype).float()
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), arguments)
    data = quantize(weight, scale, zero, arguments, dtype=torch.float8_e4m3fn)
    q = qk.quantize(spread(dtype), "ptpc_fp8")
    assert torch.equal(q.scale, scale.float())
    ours, theirs = raw(q.data), raw(data)
    assert (ours == 0x80).any()
    assert torch.equal(ours.masked_fill(ours == 0x80, 0), theirs.masked_fill(theirs == 0x80, 0))
    assert not (theirs[(weight == 0).flatten()] == 0x80).any()


def test_reciprocal_of_the_greatest_code_is_not_division() -> None:
    """What several kernels elsewhere do, amax * (1/448), misses nearly half of all scales by an ulp."""
    amax = qk.amax(spread(torch.bfloat16), "row")
    product = amax * (torch.tensor(1.0) / torch.tensor(448.0))
    exact = qk.quantize(spread(torch.bfloat16), "ptpc_fp8").scale
    assert 0.2 < (product != exact).float().mean() < 0.8
