"""`on_unmatched`: entries that fit no layer stop a job before it touches anything, however it is begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from quant_kernels import OnlineQuantizer, plan_model, quantize_model
from quant_spec import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = {"global_quant_config": "mxfp8", "exclude_layer": ["fisrt", "second"]}
WAYS: dict[str, Callable[..., object]] = {
    "plan_model": plan_model,
    "quantize_model": lambda *given, **options: quantize_model(*given, write_report=False, **options),
    "OnlineQuantizer": lambda *given, **options: OnlineQuantizer(*given, write_report=False, **options),
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
def test_entries_that_fit_nothing(way: str) -> None:
    model = Two()
    before = model.first.weight.clone()
    with pytest.raises(PlanError, match=r"\$\.exclude_layer\[0\]: 'fisrt' matches no module; did you mean 'first'\?"):
        WAYS[way](model, REQUEST, on_unmatched="error")
    assert torch.equal(model.first.weight, before)
    with pytest.raises(PlanError, match="on_unmatched: found 'errror'; allowed: warn, error; did you mean 'error'"):
        WAYS[way](model, REQUEST, on_unmatched="errror")
    WAYS[way](model, {**REQUEST, "exclude_layer": ["second"]}, on_unmatched="error")


@pytest.mark.parametrize("way", WAYS)
def test_they_are_a_warning_unless_asked(way: str) -> None:
    WAYS[way](Two(), REQUEST)
