"""The vLLM plug-in on recorded hook calls, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING

import fake_vllm
import pytest
import recorded
import torch
from torch.nn import functional

import quant_kernels
from quant_spec import ConfigError, PlanError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.experts*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.mlp.gate"],
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CLASSES = {"RoutedExperts": fake_vllm.RoutedExperts, "ParallelLMHead": fake_vllm.ParallelLMHead}


def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: object) -> type:
    """Return the config class that the plug-in registers."""
    monkeypatch.setenv("QUANT_SPEC_REPORT_DIR", str(tmp_path))
    registered = fake_vllm.install(monkeypatch, **options)
    from quant_kernels.integrations.vllm import register

    register()
    register()  # vLLM calls it once a process, some processes twice
    assert [*registered] == ["quant_spec"]
    return registered["quant_spec"]


def build(
    config: object, model: str, device: str, *, times: int = 1
) -> tuple[dict[str, nn.Module], dict[str, dict[str, torch.Tensor]]]:
    """Play construction and loading; return the modules that got a method, and the values they were loaded with."""
    modules: dict[str, nn.Module] = {}
    for call in recorded.calls(model):
        if call.hook == "maybe_update_config":
            config.maybe_update_config(model, SimpleNamespace(tie_word_embeddings=False, dtype="float32"))
        elif call.hook == "apply_vllm_mapper":
            config.apply_vllm_mapper(SimpleNamespace(orig_to_new_prefix={}, orig_to_new_substr={}))
        elif call.hook == "packed_modules_mapping":
            config.packed_modules_mapping = call.json(0)
        elif call.hook == "get_quant_method":
            class_name, name = call.arguments
            base = CLASSES.get(class_name, fake_vllm.LinearBase if "Linear" in class_name else fake_vllm.Layer)
            module = modules.get(name) or type(class_name, (base,), {})(config)
            method = config.get_quant_method(module, name)
            assert (method is None) == (not name or base is fake_vllm.Layer or name == "lm_head"), call
            if method is not None:
                modules[name] = module
                module.quant_method = method
        elif call.hook == "create_weights":
            name, _, inputs, outputs, whole_in, whole_out = call.arguments[:6]
            rows = [times * each for each in json.loads(outputs)]
            sizes = (times * int(inputs), rows, times * int(whole_in), times * int(whole_out), torch.float32)
            modules[name].quant_method.create_weights(modules[name], *sizes, weight_loader=print)
        elif call.hook == "moe.create_weights":
            name, experts, hidden, inner = call.arguments[:4]
            module = modules[name]
            module.quant_method.create_weights(
                module, int(experts), times * int(hidden), times * int(inner), torch.float32, weight_loader=print
            )
    if times > 1:
        return modules, {}
    loaded = {name: recorded.fill(module, index, device) for index, (name, module) in enumerate(modules.items())}
    return modules, loaded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", recorded.MODELS)
def test_recorded_hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, device: str) -> None:
    config = plugin(monkeypatch, tmp_path).from_config_dict_json(json.dumps(REQUEST))
    modules, loaded = build(config, model, device)
    for module in modules.values():
        module.quant_method.process_weights_after_loading(module)
    for module in modules.values():  # vLLM calls it again for all modules at the end
        module.quant_method.process_weights_after_loading(module)
        assert module.quant_config is config
    (path,) = tmp_path.glob("online_quant_info_*.json")
    report = json.loads(path.read_text())
    converted = {layer["layer"] for layer in report["layers"]}
    assert converted == {name for name in modules if not name.endswith(".mlp.gate")}
    for name in converted:
        check_products(modules[name], loaded[name], device)


def check_products(module: nn.Module, loaded: dict[str, torch.Tensor], device: str) -> None:
    """The module computes with what its weights became."""
    method = module.quant_method
    if "weight" in loaded:
        quantized = quant_kernels.quantize(loaded["weight"], "ptpc_fp8")
        x = torch.randn(5, loaded["weight"].shape[1], device=device)
        expected = quant_kernels.linear(x, quantized, activation=method._activation)
        assert torch.equal(method.apply(module, x), expected)
        wide = quant_kernels.dequantize(quantized, torch.bfloat16)
        assert torch.equal(method.dequantize_weight(module), wide)
        return
    stacks = {
        name: quant_kernels.dequantize(quant_kernels.quantize(w, "mxfp4"), torch.float32) for name, w in loaded.items()
    }
    count, _, hidden = loaded["w13_weight"].shape
    x = torch.randn(6, hidden, device=device)
    ids = torch.stack([torch.randperm(count, device=device)[:2] for _ in range(6)])
    weights = torch.rand(6, 2, device=device)
    method._activation = None  # weights only, so that plain products are the reference
    found = method.apply(module, x, weights, ids, None, None)
    expected = torch.zeros_like(x)
    for token in range(6):
        for expert, share in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = functional.linear(x[token], stacks["w13_weight"][expert]).chunk(2)
            expected[token] += share * functional.linear(functional.silu(gate) * up, stacks["w2_weight"][expert])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    module.expert_map = torch.full((count,), -1, device=device)
    assert not method.apply(module, x, weights, ids, None, None).any()  # experts of other ranks add nothing here


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", recorded.MODELS)
def test_block_fp8_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, device: str) -> None:
    """Layers that the request names are converted from their codes; the others are used as they are stored."""
    request = {"layer_quant_config": {"*.mlp.experts": "mxfp4", "*.o_proj": "ptpc_fp8"}}
    document = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "*.mlp.gate"],
    }
    cls = plugin(monkeypatch, tmp_path, hf_overrides={"quantization_config_dict_json": json.dumps(request)})
    assert cls.override_quantization_method(document, "quant_spec") == "quant_spec"
    assert cls.override_quantization_method(document, "fp8") is None
    config = cls.from_config(document)
    modules, _ = build(config, model, device, times=2)  # whole blocks, as real models have them
    sources = {name: fill_blocks(module, device) for name, module in modules.items()}
    for module in modules.values():
        module.quant_method.process_weights_after_loading(module)
    for name, module in modules.items():
        method = module.quant_method
        if name.endswith(".mlp.gate"):
            assert isinstance(method, fake_vllm.UnquantizedLinearMethod)
        elif name.endswith(".experts"):
            for stack, source in sources[name].items():
                wanted = quant_kernels.quantize(quant_kernels.dequantize(source, torch.float32), "mxfp4")
                for expert, held in enumerate(method._experts[stack]):
                    assert torch.equal(held.data.view(torch.uint8), wanted.data[expert].view(torch.uint8))
        else:
            source = sources[name]["weight"]
            x = torch.randn(3, source.shape[1], device=device)
            if name.endswith(".o_proj"):
                source = quant_kernels.quantize(quant_kernels.dequantize(source, torch.float32), "ptpc_fp8")
            assert torch.equal(method.apply(module, x), quant_kernels.linear(x, source, activation=method._activation))
    (path,) = tmp_path.glob("online_quant_info_*.json")
    kept = {each["layer"]: each["source"] for each in json.loads(path.read_text())["kept"]}
    assert all(word == "fp8_e4m3/block_128x128" for name, word in kept.items() if not name.endswith(".mlp.gate"))


def fill_blocks(module: nn.Module, device: str) -> dict[str, quant_kernels.QuantizedTensor]:
    """Load random block-FP8 weights, as a loader does; return them."""
    found = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if f"{name}_scale_inv" not in dict(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                module.register_parameter(name, torch.nn.Parameter(torch.randn(parameter.shape), requires_grad=False))
            continue
        source = quant_kernels.quantize(torch.randn(parameter.shape, device=device), "per_block_fp8")
        assert source.scale.shape == getattr(module, f"{name}_scale_inv").shape
        module.register_parameter(name, torch.nn.Parameter(source.data.clone(), requires_grad=False))
        module.register_parameter(f"{name}_scale_inv", torch.nn.Parameter(source.scale.clone(), requires_grad=False))
        found[name] = source
    return found


def test_shards_that_share_a_block_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = {"global_quant_config": "ptpc_fp8"}
    cls = plugin(monkeypatch, tmp_path, hf_overrides={"quantization_config_dict_json": json.dumps(request)})
    config = cls.from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})
    layer = type("QKVParallelLinear", (fake_vllm.LinearBase,), {})(config)
    method = config.get_quant_method(layer, "a.qkv_proj")
    with pytest.raises(PlanError, match=r"a\.qkv_proj: .*64.*128"):
        method.create_weights(layer, 256, [256, 64, 64], 256, 384, torch.float32, weight_loader=print)
    method.create_weights(
        layer, 256, [256, 576], 256, 832, torch.float32, weight_loader=print
    )  # the last may be ragged
    experts = fake_vllm.RoutedExperts(config)
    method = config.get_quant_method(experts, "a.mlp.experts")
    with pytest.raises(PlanError, match=r"a\.mlp\.experts: .*64.*128"):
        method.create_weights(experts, 4, 128, 64, torch.float32, weight_loader=print)


def test_other_quantized_checkpoints_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cls = plugin(monkeypatch, tmp_path, hf_overrides={"quantization_config_dict_json": json.dumps(REQUEST)})
    for document in ({"quant_method": "awq", "bits": 4}, {"quant_method": "fp8", "activation_scheme": "static"}):
        with pytest.raises(ConfigError, match="quant-spec quantize"):
            cls.from_config(document).quantizer()


def test_requests_come_by_vllms_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(REQUEST))
    cls = plugin(monkeypatch, tmp_path, hf_overrides={"quantization_config_file": str(file)})
    assert cls.from_config_file(str(file)).request == REQUEST
    # A checkpoint with a config of its own: the request is found in the options of the model.
    quantizer = cls.from_config({"quant_method": "fp8", "weight_block_size": [128, 128]}).quantizer()
    assert str(quantizer.config.resolve("a.mlp.experts").weight) == "mxfp4"
    given = cls()
    args = SimpleNamespace(targets={"*.mlp.*": "mxfp8"}, ignore=["*.down_proj"], linear=None, moe=None)
    given.online_quantization_config = SimpleNamespace(args=args)
    assert given.request == {"targets": {"*.mlp.*": "mxfp8"}, "ignore": ["*.down_proj"]}
    assert given.online_quantization_config is None
    linear = SimpleNamespace(weight="key of mxfp4", activation=None)
    given = cls()
    given.online_quantization_config = SimpleNamespace(
        args=SimpleNamespace(targets=None, ignore=[], linear=linear, moe=None)
    )
    assert given.request == {"linear": {"weight": "mxfp4"}}


def test_bad_requests_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cls = plugin(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="quantization_config_dict_json"):
        cls.from_config_dict_json("{")
    with pytest.raises(ConfigError, match="mxfp5"):
        cls.from_config_dict_json('{"global_quant_config": "mxfp5"}')
    with pytest.raises(ConfigError, match="no request"):
        cls().quantizer()
    both = cls(REQUEST)
    with pytest.raises(ConfigError, match="two requests"):
        both.online_quantization_config = SimpleNamespace(args=SimpleNamespace(targets={}, ignore=[]))
    unnamed = SimpleNamespace(weight="another key", activation=None)
    with pytest.raises(ConfigError, match=r"\$\.moe\.weight"):
        cls().online_quantization_config = SimpleNamespace(
            args=SimpleNamespace(targets=None, ignore=[], linear=None, moe=unnamed)
        )


def test_experts_that_cannot_be_run_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = plugin(monkeypatch, tmp_path)(REQUEST)
    with pytest.raises(PlanError, match=r"a\.mlp\.experts: .*swigluoai"):
        config.get_quant_method(fake_vllm.RoutedExperts(config, "swigluoai"), "a.mlp.experts")


def test_a_tied_head_stays_with_the_embedding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = plugin(monkeypatch, tmp_path)({"global_quant_config": "mxfp4"})
    config.maybe_update_config("m", SimpleNamespace(tie_word_embeddings=True))
    assert config.get_quant_method(fake_vllm.ParallelLMHead(config), "lm_head") is None
    config.maybe_update_config("m", SimpleNamespace(tie_word_embeddings=False))
    assert config.get_quant_method(fake_vllm.ParallelLMHead(config), "lm_head") is not None


def test_an_untested_version_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quant_kernels"):
        plugin(monkeypatch, tmp_path, version="0.99.0")
    assert "0.99.0" in caplog.text


def test_config_survives_pickling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM sends it to its workers before any module is built."""
    import pickle

    config = plugin(monkeypatch, tmp_path)(REQUEST)
    assert pickle.loads(pickle.dumps(config)).request == REQUEST  # noqa: S301  (our own bytes)
