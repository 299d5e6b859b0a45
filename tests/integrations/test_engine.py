"""EngineQuantizer: the order of calls of vLLM and SGLang, that of ATOM, and every wrong order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import recorded
import torch
from torch import nn

import quant_kernels
from quant_kernels.integrations.engine import EngineQuantizer
from quant_spec import ConfigError, LoadError, PlanError, QuantizationConfig, ResolveError

if TYPE_CHECKING:
    from pathlib import Path

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.experts*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.mlp.gate"],
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def quantizer(request: object = None, **options: object) -> EngineQuantizer:
    """Return a quantizer that writes no file."""
    return EngineQuantizer(REQUEST if request is None else request, write_report=False, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", recorded.MODELS)
def test_recorded_hooks_of_an_engine(model: str, device: str) -> None:
    """Modules are asked for while they are built, the mapping comes late, each is converted once its weights are in."""
    engine = quantizer()
    modules: dict[str, nn.Module] = {}
    for call in recorded.calls(model):
        if call.hook == "packed_modules_mapping":
            engine.map_packed(call.json(0))
        elif call.hook == "get_quant_method" and call.arguments[0] in ("Attention", "MLAAttention"):
            assert call.arguments[1].endswith(".attn")  # no Linear: never asked about
        elif call.hook == "get_quant_method":
            class_name, name = call.arguments
            module = modules.setdefault(name, recorded.module_of(class_name))
            kind = "moe" if class_name == "RoutedExperts" else "embedding" if "Embedding" in class_name else "linear"
            found = engine.add(name, module, kind=kind)
            assert (found is None) == (name == "")
        elif call.hook in ("create_weights", "moe.create_weights"):
            recorded.create(modules[call.arguments[0]], call)
    modules.pop("", None)
    loaded = {name: recorded.fill(module, index, device) for index, (name, module) in enumerate(modules.items())}
    converted = {name for name in modules if engine.convert(name)}
    assert converted
    assert engine.waiting == ()
    assert not any(engine.convert(name) for name in modules)
    for name, values in loaded.items():
        if name not in converted:
            assert engine.weights(name) == {}
            assert all(torch.equal(getattr(modules[name], key), value) for key, value in values.items())
            continue
        target = "mxfp4" if name.endswith(".experts") else "ptpc_fp8"
        for key, held in engine.weights(name).items():
            wanted = quant_kernels.quantize(values[key], target)
            assert torch.equal(held.data.view(torch.uint8), wanted.data.view(torch.uint8)), f"{name}.{key}"
            assert torch.equal(held.scale.view(torch.uint8), wanted.scale.view(torch.uint8)), f"{name}.{key}"
            assert tuple(held.shape) == tuple(values[key].shape)
    assert engine.report is not None
    assert {layer.layer for layer in engine.report.layers} == converted
    assert {layer.layer for layer in engine.report.kept} == {name for name in loaded if loaded[name]} - converted


def _linear(rows: int = 64, inputs: int = 64) -> nn.Linear:
    return nn.Linear(inputs, rows, bias=False)


def test_order_of_atom(tmp_path: Path) -> None:
    """Formats are asked for by name alone; modules hold weights from the start; a report is written at the end."""
    config = QuantizationConfig.from_online(REQUEST)
    assert str(config.resolve("model.layers.0.self_attn.o_proj").weight) == "fp8_e4m3/per_channel"
    engine = EngineQuantizer(config, report_dir=tmp_path, model="tiny")
    layers = {"model.layers.0.self_attn.o_proj": _linear(), "lm_head": _linear()}
    for name, layer in layers.items():
        engine.add(name, layer)
    for name in layers:
        engine.convert(name)
    (path,) = tmp_path.glob("online_quant_info_*.json")
    written = json.loads(path.read_text())
    assert written["num_layers"] == 1
    assert written["model"] == "tiny"
    assert layers["model.layers.0.self_attn.o_proj"].quant_type == "per_Token"


def test_what_shapes_rule_out_is_kept_and_reported() -> None:
    engine = quantizer({"global_quant_config": "mxfp4"})
    odd, even = _linear(inputs=48), _linear()
    assert engine.add("odd", odd).is_quantized  # the name alone does not tell
    engine.add("even", even)
    assert (engine.converts("odd"), engine.converts("even")) == (False, True)
    assert (engine.convert("odd"), engine.convert("even")) == (False, True)
    assert odd.weight.dtype == torch.float32
    assert engine.report is not None
    (kept,) = engine.report.kept
    assert (kept.layer, "48" in kept.reason) == ("odd", True)


def test_late_news_is_refused() -> None:
    engine = quantizer({"global_quant_config": "mxfp4"})
    engine.add("a", _linear())
    engine.add("b", _linear())
    engine.convert("a")
    for late in (
        lambda: engine.add("c", _linear()),
        lambda: engine.map_packed({"qkv_proj": ["q_proj"]}),
        lambda: engine.rename({"a": "b"}),
        lambda: engine.expect_experts(4),
        lambda: engine.tie("a", "b"),
    ):
        with pytest.raises(LoadError, match="after weights were converted"):
            late()
    engine.map_packed({})  # what is known already is no news
    engine.convert("b")


def test_refusals_name_the_module() -> None:
    engine = quantizer({"global_quant_config": "mxfp4"})
    engine.add("a", _linear())
    with pytest.raises(LoadError, match="a: two modules"):
        engine.add("a", _linear())
    with pytest.raises(LoadError, match="nowhere: no module"):
        engine.convert("nowhere")
    empty = quantizer({"global_quant_config": "mxfp4"})
    empty.add("a", nn.Linear(64, 64, bias=False, device="meta"))
    with pytest.raises(LoadError, match=r"a\.weight: on meta"):
        empty.convert("a")
    with pytest.raises(ConfigError, match="mxfp5"):
        quantizer({"global_quant_config": "mxfp5"})


def test_a_request_that_changes_nothing_is_refused_before_any_weight_is_touched() -> None:
    engine = quantizer({"layer_quant_config": {"*.self_atn.*": "mxfp4"}})
    module = _linear()
    engine.add("model.layers.0.self_attn.o_proj", module)
    with pytest.raises(PlanError, match="self_atn"):
        engine.convert("model.layers.0.self_attn.o_proj")
    assert module.weight.dtype == torch.float32


def test_shards_that_disagree_are_refused_where_the_module_is_built() -> None:
    engine = quantizer({"layer_quant_config": {"*.q_proj": "mxfp4", "*.k_proj": "mxfp8"}})
    engine.map_packed({"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    with pytest.raises(ResolveError, match="qkv_proj"):
        engine.add("model.layers.0.self_attn.qkv_proj", _linear())


def test_tied_weights_stay_together() -> None:
    engine = quantizer({"global_quant_config": "mxfp4"})
    head, other = _linear(), _linear()
    engine.add("lm_head", head)
    engine.add("other", other)
    engine.tie("lm_head", "model.embed_tokens")
    assert not engine.convert("lm_head")
    assert engine.convert("other")
    assert engine.report is not None
    assert "embed_tokens" in engine.report.kept[0].reason
