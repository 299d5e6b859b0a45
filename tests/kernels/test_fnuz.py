"""OCP codes re-read as FNUZ: every one of the 256 codes keeps its value."""

from __future__ import annotations

import pytest
import torch

from quant_kernels import e4m3fn_to_e4m3fnuz
from quant_spec import QuantSpecError


def test_every_code_keeps_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5], [3.0]])
    data, doubled = e4m3fn_to_e4m3fnuz(codes, scale)
    assert data.dtype == torch.float8_e4m3fnuz
    assert torch.equal(doubled, scale * 2)
    torch.testing.assert_close(data.float() * doubled, codes.float() * scale, rtol=0, atol=0, equal_nan=True)
    assert data.view(torch.uint8)[[0x80, 0x7F, 0xFF]].tolist() == [0x00, 0x80, 0x80]


def test_refused() -> None:
    with pytest.raises(QuantSpecError, match="data"):
        e4m3fn_to_e4m3fnuz(torch.zeros(2), torch.ones(1))
    with pytest.raises(QuantSpecError, match="scale"):
        e4m3fn_to_e4m3fnuz(torch.zeros(2).to(torch.float8_e4m3fn), torch.ones(1, dtype=torch.float16))
