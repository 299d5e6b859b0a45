"""The short form of hard_numbers.py, and that it sees what it looks for."""

from __future__ import annotations

import hard_numbers
import pytest
import torch

import quant_kernels as qk
from quant_kernels.library import native_on


def test_every_source_to_every_target() -> None:
    counts = hard_numbers.Counts()
    hard_numbers.one_round(7, "cpu", counts, most=40)
    assert counts.converted > 300
    assert counts.refused > 100
    assert counts.passed > 30
    assert counts.repeated == 75


@pytest.mark.skipif(not native_on("cpu"), reason="needs the compiled library")
def test_one_wrong_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = qk.quantize

    def wrong(*arguments: object, **options: object) -> qk.QuantizedTensor:
        q = original(*arguments, **options)
        if native_on("cpu"):
            q.data.view(torch.uint8).view(-1)[-1] ^= 1
        return q

    monkeypatch.setattr(qk, "quantize", wrong)
    with pytest.raises(AssertionError, match="data"):
        hard_numbers.one_round(7, "cpu", hard_numbers.Counts(), most=40)
