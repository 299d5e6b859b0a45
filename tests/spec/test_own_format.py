"""A format defined in this file goes all the way: request, resolve, plan, quantize, report. No other file knows it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from quant_kernels import quantize
from quant_kernels.loading.model import quantize_model
from quant_spec import (
    ConfigError,
    ModuleInfo,
    QuantFormat,
    QuantizationConfig,
    QuantKey,
    ScaleDesc,
    plan,
    register_format,
)
from quant_spec.dtypes import FP32, INT8
from quant_spec.formats import request_words
from quant_spec.formats.base import FORMATS
from quant_spec.granularity import PerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = QuantKey(INT8, ScaleDesc(FP32, PerGroup(16)))
NAME = "test_int8_groups"


def quantize_int8(weight: torch.Tensor, scale_rounding: str | None) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Return codes [.., N, K] int8 and scales [.., N, K / 16] fp32: amax / 127, nearest, ties to even."""
    assert scale_rounding is None
    groups = weight.float().unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-126) / 127
    codes = torch.round(groups / scale).clamp(-127, 127).to(torch.int8)
    return codes.flatten(-2), scale.squeeze(-1), None


@pytest.fixture(autouse=True)
def own_format() -> Iterator[QuantFormat]:
    """The format, known for one test."""
    yield register_format(
        QuantFormat(
            name=NAME,
            summary="INT8 in groups of 16, made by a test",
            weight=KEY,
            activation=KEY.as_activation(dynamic=True),
            aliases=("test_eight",),
            shorthands=("test_short",),
            k_multiple=16,
            reference=quantize_int8,
        )
    )
    FORMATS.unregister(NAME)


@pytest.mark.parametrize(
    "request_",
    [
        {"global_quant_config": NAME},
        {"global_quant_config": " TEST_EIGHT "},
        {"layer_quant_config": {"*": "test_eight"}},
        {"targets": {"*": NAME}},
        {"targets": {"*": {"weight": "test_short"}}},
        {"linear": "test_short"},
        {"targets": {"*": "int8/group_16"}},
    ],
)
def test_every_way_to_ask_for_it(request_: dict[str, object]) -> None:
    config = QuantizationConfig.from_online(request_)
    layer = config.resolve("model.layers.0.mlp.up_proj")
    assert layer.weight == KEY
    assert layer.activation == KEY.as_activation(dynamic=True)
    assert layer.quant_type == "per_1x16"
    assert layer.quant_dtype is torch.int8
    assert config.digest() != QuantizationConfig().digest()


def test_errors_and_words_know_it() -> None:
    assert {NAME, "test_eight"} <= set(request_words())
    with pytest.raises(ConfigError, match=f"did you mean '{NAME}'"):
        QuantizationConfig.from_online({"global_quant_config": f"{NAME}x"})


def test_the_plan_knows_its_sizes_and_its_rule() -> None:
    config = QuantizationConfig.from_online({"global_quant_config": NAME})
    found = plan(config, {"a": ModuleInfo(shape=(8, 64)), "b": ModuleInfo(shape=(8, 40))})
    assert found["a"].nbytes("bfloat16") == (8 * 64 * 2, 8 * 64 + 8 * 4 * 4)
    assert found["b"].decision.reason == "input side of 40, is not a multiple of 16 as int8/group_16 needs"


@pytest.mark.parametrize("shape", [(8, 64), (3, 8, 64)])
def test_it_quantizes_by_its_own_reference(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = quantize(weight, NAME)
    data, scale, _ = quantize_int8(weight, None)
    assert found.key == KEY
    assert tuple(found.shape) == shape
    assert torch.equal(found.data, data)
    assert torch.equal(found.scale, scale)
    restored = found.data.float() * found.scale.repeat_interleave(16, -1)
    assert (restored - weight.float()).abs().max() <= found.scale.max() / 2


def test_a_model_is_quantized_to_it_and_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(40, 8))
    before = model[0].weight.detach().clone()
    report = quantize_model(model, {"global_quant_config": NAME}, report_dir=tmp_path)
    data, scale, _ = quantize_int8(before, None)
    assert torch.equal(model[0].weight, data)
    assert torch.equal(model[0].weight_scale, scale)
    (written,) = tmp_path.glob("online_quant_info_*.json")
    document = json.loads(written.read_text("utf-8"))
    (layer,) = document["layers"]
    assert (layer["layer"], layer["quant_type"], layer["quant_dtype"]) == ("0", "per_1x16", "torch.int8")
    assert (layer["target"], layer["kernel"]) == ("int8/group_16", "reference")
    (kept,) = document["kept"]
    assert "input side of 40, is not a multiple of 16" in kept["reason"]
    assert report.num_layers == 1


def test_it_is_forgotten_afterwards() -> None:
    FORMATS.unregister(NAME)
    with pytest.raises(ConfigError):
        QuantizationConfig.from_online({"global_quant_config": NAME})
    register_format(QuantFormat(NAME, "again, for the fixture", KEY, None))
    json.dumps(QuantizationConfig.from_online({"global_quant_config": NAME}).to_dict())
