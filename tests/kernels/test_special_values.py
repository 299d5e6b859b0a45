"""Zero rows, minus zero, tiny rows, NaN and Inf: what design says of them, as literal bytes."""

from __future__ import annotations

import math

import pytest
import torch

import quant_kernels as qk
from quant_kernels.checks import NonFiniteError

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")


def data(q: qk.QuantizedTensor) -> torch.Tensor:
    return q.data.cpu().view(torch.uint8)


def test_zero_rows(device: str) -> None:
    zeros = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    for name, scale in (("ptpc_fp8", 1.0), ("per_block_fp8", 1.0)):
        q = qk.quantize(zeros, name)
        assert (q.scale == scale).all()
        assert (data(q) == 0).all()
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        q = qk.quantize(zeros, name)
        assert (q.scale.view(torch.uint8) == 0).all()
        assert (data(q) == 0).all()
        assert (qk.dequantize(q) == 0).all()
    assert q.second_scale.item() == 0


def test_minus_zero_is_kept(device: str) -> None:
    weight = torch.tensor([[-0.0, 1.0] * 32], device=device)
    assert data(qk.quantize(weight, "ptpc_fp8"))[0, :2].tolist() == [0x80, 0x7E]
    assert data(qk.quantize(weight, "mxfp8"))[0, 0] == 0x80
    assert data(qk.quantize(weight, "mxfp4"))[0, 0] & 15 == 8
    assert data(qk.quantize(weight, "per_block_fp8"))[0, 0] == 0x80
    assert data(qk.quantize(weight, "ptpc_fp8", fnuz=True))[0, 0] == 0, "FNUZ has no -0: 0x80 is its NaN"


def test_tiny_rows_have_a_normal_scale(device: str) -> None:
    weight = torch.full((1, 32), 1e-40, device=device)
    q = qk.quantize(weight, "ptpc_fp8")
    assert q.scale.item() == 2.0**-126
    ratio = torch.tensor(1e-40) / torch.tensor(2.0**-126)
    assert data(q)[0, 0] == ratio.to(torch.float8_e4m3fn).view(torch.uint8)


def test_largest_values_do_not_overflow(device: str) -> None:
    weight = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16, device=device)
    assert qk.quantize(weight, "mxfp4").scale.view(torch.uint8).item() == 253
    assert qk.quantize(weight, "mxfp8", scale_rounding="even").scale.view(torch.uint8).item() == 247
    assert qk.quantize(weight, "ptpc_fp8").scale.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_mark_their_block(value: float, device: str) -> None:
    weight = torch.ones(3, 64, device=device)
    weight[1, 40] = value
    for name in ("mxfp4", "mxfp8"):
        assert qk.quantize(weight, name).scale.cpu().view(torch.uint8).tolist() == [
            [125 if name == "mxfp4" else 119, 125 if name == "mxfp4" else 119],
            [125 if name == "mxfp4" else 119, 255],
            [125 if name == "mxfp4" else 119, 125 if name == "mxfp4" else 119],
        ]
    q = qk.quantize(weight, "ptpc_fp8")
    assert q.scale[1].isnan().all() if math.isnan(value) else q.scale[1].isinf().all()
    assert data(q)[1, 40] == 0x7F
    assert data(q)[0, 0] == 0x7E
    assert not qk.dequantize(q)[1].isfinite().any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(300, 256), (2, 150, 256)])
def test_checked_mode_names_rows(name: str, shape: tuple[int, ...], device: str) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    qk.quantize(weight, name, check=True)
    weight.view(300, 256)[7, 3] = torch.inf
    weight.view(300, 256)[[211, 290], 255] = torch.nan
    with pytest.raises(NonFiniteError, match=r"mlp\.up: .* first bad rows: 7, 211, 290$") as caught:
        qk.quantize(weight, name, check=True, name="mlp.up")
    assert caught.value.rows == (7, 211, 290)
    # The bad rows are in different tiles of 128 rows, in the stack (rows 61 and 140 of its second matrix) too.
    assert caught.value.count == 3


def test_checked_mode_of_a_work_list_names_the_weight(device: str) -> None:
    weights = [torch.ones(4, 64, device=device) for _ in range(3)]
    weights[1][2, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^k_proj: 1 rows"):
        qk.quantize_many(weights, "ptpc_fp8", check=True, names=["q_proj", "k_proj", "v_proj"])


def test_bad_values_under_given_maxima_are_seen(device: str) -> None:
    weight = torch.ones(4, 64, device=device)
    weight[2, 5] = torch.nan
    amax = torch.ones(4, 1, device=device)
    with pytest.raises(NonFiniteError, match=r"first bad rows: 2$"):
        qk.quantize(weight, "ptpc_fp8", amax=amax, check=True)
