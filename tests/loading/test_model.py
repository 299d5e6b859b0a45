"""quantize_model on models that hold their weights."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from copy import deepcopy

import jsonschema
import pytest
import torch
from small_models import PACKED, Engine, assert_same, filled, state
from torch import nn

from quant_kernels import quantize
from quant_kernels.checks import NonFiniteError
from quant_kernels.loading import model as model_module
from quant_kernels.loading.model import quantize_model
from quant_spec import LoadError, NameRules, PlanError, QuantizationConfig

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*experts*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}


def config(request: object = None) -> QuantizationConfig:
    return QuantizationConfig.from_online(request or REQUEST, names=NameRules(packed_modules_mapping=PACKED))


@pytest.fixture
def engine() -> Engine:
    model = filled(Engine())
    assert isinstance(model, Engine)
    return model


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def test_layers_become_what_quantize_gives(engine: Engine) -> None:
    before = deepcopy(engine)
    report = quantize_model(engine, config(), write_report=False)
    assert [layer.layer for layer in report.layers] == [
        f"model.layers.{block}.{leaf}"
        for block in (0, 1)
        for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
    ]
    for block in (0, 1):
        attention, old = engine.model.layers[block].self_attn, before.model.layers[block].self_attn
        for name in ("qkv_proj", "o_proj"):
            linear, expected = getattr(attention, name), quantize(getattr(old, name).weight.detach(), "ptpc_fp8")
            assert linear.weight.dtype is torch.float8_e4m3fn
            assert torch.equal(raw(linear.weight), raw(expected.data))
            assert torch.equal(linear.weight_scale, expected.scale)
            assert (linear.quant_type, str(linear.quant_config.weight)) == ("per_Token", "fp8_e4m3/per_channel")
        experts, old_experts = engine.model.layers[block].mlp.experts, before.model.layers[block].mlp.experts
        for name in ("w13_weight", "w2_weight"):
            expected = quantize(getattr(old_experts, name).detach(), "mxfp4")
            assert getattr(experts, name).dtype is torch.float4_e2m1fn_x2
            assert torch.equal(raw(getattr(experts, name)), raw(expected.data))
            assert torch.equal(raw(getattr(experts, f"{name}_scale")), raw(expected.scale))
        assert experts.quant_type == "per_1x32"


def test_embeddings_norms_biases_and_excluded_layers_keep_their_bytes(engine: Engine) -> None:
    before = state(engine)
    report = quantize_model(engine, config(), write_report=False)
    after = state(engine)
    kept = [name for name in before if not any(part in name for part in ("qkv_proj", "o_proj.weight", "experts"))]
    assert len(kept) == 2 + 2 * 3
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    assert {layer.layer: layer.reason for layer in report.kept} == {
        "model.layers.0.mlp.gate": "excluded",
        "model.layers.1.mlp.gate": "excluded",
        "lm_head": "excluded",
    }


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_have_their_own_dtypes_whatever_the_default_is(engine: Engine, default: torch.dtype) -> None:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        quantize_model(engine, config(), write_report=False)
    finally:
        torch.set_default_dtype(usual)
    block = engine.model.layers[0]
    assert block.self_attn.o_proj.weight_scale.dtype is torch.float32
    assert block.mlp.experts.w13_weight_scale.dtype is torch.float8_e8m0fnu


def test_source_storage_is_freed_layer_by_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is converted, the storage of those before it is gone; at most one layer's is there twice."""
    storages: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    alive: list[int] = []
    for name, parameter in engine.named_parameters():
        if any(part in name for part in ("qkv_proj", "o_proj.weight", "experts")):
            storages[name] = weakref.ref(parameter.untyped_storage())
            weakref.finalize(parameter, lambda: None)
    parameters = [weakref.ref(p) for n, p in engine.named_parameters() if n in storages]
    original = model_module.LayerConverter.convert

    def watched(self: object, plan: object, works: object) -> object:
        alive.append(sum(ref() is not None for ref in parameters))
        return original(self, plan, works)

    monkeypatch.setattr(model_module.LayerConverter, "convert", watched)
    quantize_model(engine, config(), write_report=False)
    gc.collect()
    assert alive == [8, 7, 6, 4, 3, 2]
    assert all(ref() is None for ref in parameters)


def test_resident_memory_falls() -> None:
    """64 MB of bf16 weights become 16 MB + scales of MXFP4: the difference goes back to the system.

    In a process of its own: what an allocator gives back depends on all that it gave out before.
    """
    program = """
import gc
import resource
import torch
from torch import nn
from quant_kernels import quantize_model

def resident():
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()

model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16) for _ in range(4)))
warm = nn.Sequential(nn.Linear(64, 64, bias=False))
quantize_model(warm, {"global_quant_config": "mxfp4"}, write_report=False)
before = resident()
quantize_model(model, {"global_quant_config": "mxfp4"}, write_report=False)
gc.collect()
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40e6


def test_bad_value_names_the_tensor_and_leaves_its_module_alone(engine: Engine) -> None:
    engine.model.layers[1].mlp.experts.w2_weight.data[2, 5, 3] = float("nan")
    before = state(engine)
    with pytest.raises(NonFiniteError) as caught:
        quantize_model(engine, config(), write_report=False)
    assert "model.layers.1.mlp.experts.w2_weight: expert 2" in str(caught.value)
    assert caught.value.rows == (5,)
    assert "5 of 6 layers were quantized; model.layers.1.mlp.experts and the others are untouched" in str(caught.value)
    after = state(engine)
    for name in ("w13_weight", "w2_weight"):
        full = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(before[full], after[full])
        assert not hasattr(engine.model.layers[1].mlp.experts, f"{name}_scale")
    assert engine.model.layers[0].mlp.experts.w2_weight.dtype is torch.float4_e2m1fn_x2


def test_unchecked_mode_stores_the_formats_nan(engine: Engine) -> None:
    engine.model.layers[0].self_attn.o_proj.weight.data[7] = float("nan")
    quantize_model(engine, config(), check=False, write_report=False)
    assert bool((engine.model.layers[0].self_attn.o_proj.weight[7].view(torch.uint8) & 0x7F == 0x7F).all())


def test_out_of_memory_in_the_middle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_kernels.loading import layer

    calls = []

    def failing(works: object, target: object, options: object) -> object:
        calls.append(works)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory left")
        return original(works, target, options)

    original = layer.convert_weights
    monkeypatch.setattr(layer, "convert_weights", failing)
    with pytest.raises(LoadError, match=r"model\.layers\.0\.mlp\.experts: OutOfMemoryError: no memory left\n2 of 6"):
        quantize_model(engine, config(), write_report=False)
    assert engine.model.layers[0].self_attn.o_proj.weight.dtype is torch.float8_e4m3fn
    assert engine.model.layers[0].mlp.experts.w13_weight.dtype is torch.bfloat16


def test_interrupt_leaves_whole_modules(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_kernels.loading import layer

    def interrupted(works: object, target: object, options: object) -> object:
        if calls:
            raise KeyboardInterrupt
        calls.append(works)
        return original(works, target, options)

    calls: list[object] = []
    original = layer.convert_weights
    monkeypatch.setattr(layer, "convert_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(engine, config(), write_report=False)
    assert engine.model.layers[0].self_attn.qkv_proj.weight.dtype is torch.float8_e4m3fn
    assert engine.model.layers[0].self_attn.o_proj.weight.dtype is torch.bfloat16


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 32, dtype=torch.bfloat16)
        self.narrow = nn.Linear(40, 32, dtype=torch.bfloat16)


def test_what_cannot_be_converted_is_kept_with_the_numbers() -> None:
    model = Narrow()
    report = quantize_model(model, {"global_quant_config": "mxfp4"}, write_report=False)
    assert [layer.layer for layer in report.layers] == ["wide"]
    assert [(kept.layer, kept.rule.why) for kept in report.kept] == [("narrow", "unsupported")]
    assert "40" in report.kept[0].reason
    assert "32" in report.kept[0].reason
    assert any("narrow" in warning for warning in report.warnings)
    assert model.narrow.weight.dtype is torch.bfloat16


def test_unsupported_layers_are_an_error_before_any_is_touched() -> None:
    model = Narrow()
    with pytest.raises(PlanError, match="1 layers cannot be converted:\n  narrow: input side of 40"):
        quantize_model(model, {"global_quant_config": "mxfp4"}, on_unsupported="error", write_report=False)
    assert model.wide.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_unsupported": "keeps"}, r"on_unsupported: found 'keeps'; allowed: keep, error; did you mean 'keep'"),
        ({"requantize_sources": ("mxfp5",)}, r"requantize_sources: found 'mxfp5'; allowed: mxfp4, nvfp4"),
        ({"scale_rounding": "down"}, r"scale_rounding: found 'down'; allowed: even, floor, rceil"),
    ],
)
def test_unknown_words_are_refused(engine: Engine, options: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        quantize_model(engine, config(), write_report=False, **options)


def test_request_that_changes_nothing_is_an_error(engine: Engine) -> None:
    with pytest.raises(PlanError, match="changes none of"):
        quantize_model(engine, config({"layer_quant_config": {"*nothing*": "mxfp4"}}), write_report=False)


def test_a_checkpoints_own_config_asks_for_nothing(engine: Engine) -> None:
    stored = QuantizationConfig.from_dict({"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(PlanError, match="is no request"):
        quantize_model(engine, stored, write_report=False)


def test_weights_on_meta_are_refused() -> None:
    with pytest.raises(LoadError, match=r"qkv_proj\.weight: on meta"):
        quantize_model(Engine(device="meta"), config(), write_report=False)


class Tied(nn.Module):
    def __init__(self, *, embed: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 64, dtype=torch.bfloat16)
        self.first = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.third = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.embed_tokens.weight if embed else self.first.weight


def test_tied_weights_are_converted_once() -> None:
    model = Tied(embed=False)
    report = quantize_model(model, {"global_quant_config": "mxfp8"}, write_report=False)
    assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
    assert model.first.weight_scale is model.second.weight_scale
    assert [layer.layer for layer in report.layers] == ["first", "second", "third"]


def test_weight_tied_to_an_embedding_is_kept() -> None:
    model = Tied(embed=True)
    report = quantize_model(model, {"global_quant_config": "mxfp8"}, write_report=False)
    assert model.second.weight is model.embed_tokens.weight
    assert [(kept.layer, kept.reason) for kept in report.kept] == [
        ("second", "it shares its weight with embed_tokens.weight, which is not quantized")
    ]


def test_tied_weights_of_two_formats_are_kept() -> None:
    model = Tied(embed=False)
    request = {"global_quant_config": "mxfp8", "layer_quant_config": {"second": "mxfp4"}}
    report = quantize_model(model, request, write_report=False)
    assert [layer.layer for layer in report.layers] == ["third"]
    assert model.first.weight is model.second.weight


def test_a_second_pass_leaves_the_bytes_alone(engine: Engine) -> None:
    quantize_model(engine, config(), write_report=False)
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}},
        "layer_quant_config": {"*experts*": {"weight": FP4}},
        "exclude": ["lm_head", "re:.*gate"],
    }
    source = QuantizationConfig.from_dict(quark, names=NameRules(packed_modules_mapping=PACKED))
    before = state(engine)
    again = QuantizationConfig.from_online({**REQUEST, "exclude_layer": ["*.gate.*"]}, source=source)
    report = quantize_model(engine, again, write_report=False)
    assert [layer.layer for layer in report.layers] == ["lm_head"]
    after = state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("lm_head"))
    assert {kept.reason for kept in report.kept if "gate" not in kept.layer} == {"already in the format asked for"}


class PerExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict() for _ in range(3))
        for expert in self.experts:
            for name, shape in (("gate_proj", (64, 32)), ("up_proj", (64, 32)), ("down_proj", (32, 64))):
                expert[name] = nn.Linear(*shape, bias=False, dtype=torch.bfloat16)


def test_experts_as_linears_are_one_layer() -> None:
    model = PerExpert()
    before = deepcopy(model)
    report = quantize_model(
        model, {"layer_quant_config": {"*.down_proj": "mxfp8", "*experts*": "mxfp8"}}, write_report=False
    )
    assert [(layer.layer, layer.weights) for layer in report.layers] == [("experts", 9)]
    for (name, linear), (_, old) in zip(model.named_modules(), before.named_modules(), strict=True):
        if isinstance(linear, nn.Linear):
            assert torch.equal(raw(linear.weight), raw(quantize(old.weight.detach(), "mxfp8").data)), name


def test_report_file_is_what_the_schema_says(engine: Engine, tmp_path: object, root: object) -> None:
    report = quantize_model(engine, config(), measure=True, report_dir=tmp_path, name="tiny")
    assert report.saved_to is not None
    document = json.loads(report.saved_to.read_text())
    schema = json.loads((root / "schemas" / "report.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert document["num_layers"] == 6
    assert document["model"] == "tiny"
    assert document["loading"]["ranks"] == 1
    assert document["loading"]["load_seconds"] >= document["elapsed_seconds"] > 0
    layers = {layer["layer"]: layer for layer in document["layers"]}
    experts = layers["model.layers.0.mlp.experts"]
    assert (experts["quant_type"], experts["quant_dtype"]) == ("per_1x32", "torch.uint8")
    assert experts["weights"] == 8
    assert experts["shapes"] == [[4, 256, 256], [4, 256, 128]]
    assert experts["bytes_before"] == 2 * 4 * (256 * 256 + 256 * 128)
    assert experts["bytes_after"] == 4 * (256 * 256 + 256 * 128) // 2 + 4 * (256 * 256 + 256 * 128) // 32
    assert 10 < experts["sqnr_db"] < 30
    assert experts["rule"]["entry"] == "*experts*"
    totals = document["totals"]
    assert totals["bytes_before"] - totals["bytes_after"] == sum(
        each["bytes_before"] - each["bytes_after"] for each in document["layers"]
    )


def test_log_lines(engine: Engine, tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quant_kernels"):
        quantize_model(engine, config(), report_dir=tmp_path)
    text = caplog.text
    assert "seconds, 6 layers online-quantized" in text
    assert "Quantized 6 layers of types: " in text
    assert "mlp.experts: 2 (from layer_quant_config: *experts*, mxfp4)" in text
    assert "Online quantization info saved to " in text


def test_attributes_of_a_parameter_stay(engine: Engine) -> None:
    loader = object()
    engine.model.layers[0].self_attn.o_proj.weight.weight_loader = loader
    quantize_model(engine, config(), write_report=False)
    assert engine.model.layers[0].self_attn.o_proj.weight.weight_loader is loader


def test_same_result_twice(engine: Engine) -> None:
    other = deepcopy(engine)
    quantize_model(engine, config(), write_report=False)
    quantize_model(other, config(), write_report=False)
    assert_same(engine, other)


def test_codes_for_hardware_that_reads_fnuz(engine: Engine) -> None:
    weight = engine.model.layers[0].self_attn.o_proj.weight.detach().clone()
    report = quantize_model(engine, config(), fnuz=True, write_report=False)
    linear, expected = engine.model.layers[0].self_attn.o_proj, quantize(weight, "ptpc_fp8", fnuz=True)
    assert linear.weight.dtype is torch.float8_e4m3fnuz
    assert torch.equal(raw(linear.weight), raw(expected.data))
    assert torch.equal(linear.weight_scale, expected.scale)
    assert str(linear.quant_config.weight) == "fp8_e4m3fnuz/per_channel"
    assert (report.layers[1].quant_dtype, report.layers[1].quant_type) == ("torch.float8_e4m3fnuz", "per_Token")
    assert engine.model.layers[0].mlp.experts.w13_weight.dtype is torch.float4_e2m1fn_x2


def test_tile_order_of_amds_matrix_kernels(engine: Engine) -> None:
    weight = engine.model.layers[0].mlp.experts.w13_weight.detach().clone()
    quantize_model(engine, config(), layout="cdna", write_report=False)
    expected = quantize(weight, "mxfp4", layout="cdna")
    experts = engine.model.layers[0].mlp.experts
    assert torch.equal(raw(experts.w13_weight), raw(expected.data))
    assert torch.equal(raw(experts.w13_weight_scale), raw(expected.scale))


@pytest.mark.parametrize("rounding", ["even", "floor", "rceil"])
def test_scale_rounding_by_name(engine: Engine, rounding: str) -> None:
    weight = engine.model.layers[1].mlp.experts.w2_weight.detach().clone()
    quantize_model(engine, config(), scale_rounding=rounding, write_report=False)
    expected = quantize(weight, "mxfp4", scale_rounding=rounding)
    assert torch.equal(raw(engine.model.layers[1].mlp.experts.w2_weight_scale), raw(expected.scale))
