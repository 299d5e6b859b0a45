"""The short form of load.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import load

from quant_spec import answers

if TYPE_CHECKING:
    import pytest


def test_names_of_a_model_again_and_again() -> None:
    rate, _ = load.sustained(0.3)
    assert rate > 0


def test_names_that_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small caches, so that they are filled many times over."""
    monkeypatch.setattr(answers, "MAX_ROWS", 500)
    monkeypatch.setattr(answers, "MAX_REMEMBERED", 1000)
    _, kept, late = load.never_again(20_000)
    assert late <= max(kept, load.LATE_BYTES)
