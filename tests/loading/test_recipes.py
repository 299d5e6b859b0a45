"""The recipes of online quantization on the module trees of real models: every layer and expert, small sides; and plans
of the true sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from small_models import PACKED, Engine, state
from thread_ranks import ThreadRanks, results, run_ranks
from torch import nn

from quant_kernels import OnlineQuantizer, plan_model, quantize_model
from quant_spec import NameRules, QuantizationConfig
from quant_spec.matching import Why

if TYPE_CHECKING:
    from quant_spec.report import QuantReport

transformers = pytest.importorskip("transformers")
from model_trees import (  # noqa: E402  (it needs transformers)
    BLOCK_FP8,
    QWEN3_30B,
    QWEN3_235B,
    SMALL_QWEN3,
    SMALL_R1,
    block_fp8_tensors,
    deepseek,
    meta,
    qwen3,
)

KEPT = ["lm_head", "*.gate.*"]
PTPC: dict[str, object] = {"global_quant_config": "ptpc_fp8", "exclude_layer": KEPT}
MXFP4: dict[str, object] = {"global_quant_config": "mxfp4", "exclude_layer": KEPT}
MIXED: dict[str, object] = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4"},
    "exclude_layer": KEPT,
}
NAMES = NameRules(packed_modules_mapping=PACKED)


def request(recipe: dict[str, object], source: dict[str, object] | None = None) -> QuantizationConfig:
    below = QuantizationConfig.from_dict(source, names=NAMES) if source else None
    return QuantizationConfig.from_online(recipe, source=below, names=NAMES)


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)


def kinds(report: QuantReport) -> dict[str, int]:
    """Count the quantized layers by their name within a block and their format."""
    found: dict[str, int] = {}
    for layer in report.layers:
        parts = layer.layer.split(".")
        tail = ".".join(parts[3:]) if parts[:2] == ["model", "layers"] else layer.layer
        key = f"{tail} {layer.quant_type} {layer.quant_dtype}"
        found[key] = found.get(key, 0) + 1
    return found


def test_qwen3_30b_a3b_ptpc() -> None:
    """48 blocks as an engine holds them: qkv_proj, o_proj and experts of each, 144 in all."""
    model = Engine(48, 128, 64, 32, (64, 32, 32))
    fill(model)
    report = quantize_model(model, request(PTPC), write_report=False)
    assert report.num_layers == 144
    assert kinds(report) == {
        f"{tail} per_Token torch.float8_e4m3fn": 48
        for tail in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
    }
    assert {layer.layer.rpartition(".")[2] for layer in report.kept} == {"gate", "lm_head"}
    assert "144 layers online-quantized" in report.log_lines()[0]
    assert not report.warnings
    assert not report.unmatched


def test_qwen3_30b_a3b_in_the_tree_of_transformers() -> None:
    empty = qwen3({**QWEN3_30B, **SMALL_QWEN3})
    model = empty.to_empty(device="cpu")
    fill(model)
    report = quantize_model(model, request(PTPC), write_report=False)
    assert report.num_layers == 48 * 5
    experts = next(layer for layer in report.layers if layer.layer.endswith("experts"))
    assert (experts.weights, experts.shapes) == (256, ((128, 64, 64), (128, 64, 32)))
    assert model.model.layers[47].mlp.experts.gate_up_proj.dtype is torch.float8_e4m3fn
    assert model.model.layers[47].mlp.gate.weight.dtype is torch.bfloat16


def test_qwen3_235b_a22b_mxfp4_with_experts_on_two_ranks() -> None:
    """94 blocks, 128 experts, 64 on each rank; attention cut over both."""
    styles = {"*qkv_proj": "column", "*o_proj": "row", "*experts": "expert"}

    def work(ranks: ThreadRanks) -> QuantReport:
        model = Engine(94, 64, 64, 32, (32, 16, 16))
        fill(model)
        for block in model.model.layers:
            block.mlp.experts.expert_ids = range(64 * ranks.rank, 64 * ranks.rank + 64)
        return quantize_model(model, request(MXFP4), group=ranks, parallel=styles, write_report=False)

    for report in results(run_ranks(2, work, timeout=120)):
        assert report.num_layers == 94 * 3
        assert {layer.quant_type for layer in report.layers} == {"per_1x32"}
        assert {layer.quant_dtype for layer in report.layers} == {"torch.uint8"}
        experts = [layer for layer in report.layers if layer.layer.endswith("experts")]
        assert {(layer.experts, layer.weights) for layer in experts} == {("0-127", 256)}
        assert report.loading is not None
        assert report.loading.sent_bytes == 0


# -- DeepSeek-R1 -------------------------------------------------------------------------------------------------------

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SHARED = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("mtp", "experts"),
    [(False, 32), (True, 32), pytest.param(True, 256, marks=pytest.mark.slow)],
    ids=["R1", "R1 with MTP", "R1 with MTP, all experts"],
)
def test_deepseek_r1_fp8_attention_and_mxfp4_experts(*, mtp: bool, experts: int) -> None:
    """61 blocks, the first three dense, the others with experts; MTP adds one more such block."""
    model = deepseek({**SMALL_R1, "n_routed_experts": experts, "n_group": 8}, mtp=mtp)
    moe = 58 + mtp
    with OnlineQuantizer(model, request(MIXED, BLOCK_FP8), write_report=False) as quantizer:
        quantizer.load_all(block_fp8_tensors(model))
    report = quantizer.report
    fp8, fp4 = "per_Token torch.float8_e4m3fn", "per_1x32 torch.uint8"
    expected = {f"self_attn.{leaf} {fp8}": 61 + mtp for leaf in ATTENTION}
    expected |= {f"mlp.{leaf} {fp8}": 3 for leaf in SHARED}
    expected |= {f"mlp.shared_experts.{leaf} {fp4}": moe for leaf in SHARED}
    expected[f"mlp.experts {fp4}"] = moe
    if mtp:
        expected |= {f"eh_proj {fp8}": 1, f"shared_head.head {fp8}": 1}
    assert kinds(report) == expected
    routed = [layer for layer in report.layers if layer.layer.endswith("mlp.experts")]
    assert {layer.weights for layer in routed} == {2 * experts}
    sources = {layer.source for layer in report.layers if "experts" in layer.layer}
    assert sources == {"fp8_e4m3/block_128x128"}
    assert {layer.layer.rpartition(".")[2] for layer in report.kept} == {"gate", "lm_head"}
    assert {layer.source for layer in report.kept} == {"bf16"}


# -- true sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "recipe", "layers", "experts", "gigabytes"),
    [(QWEN3_30B, PTPC, 240, 48, 29.9), (QWEN3_235B, MXFP4, 470, 94, 124.2)],
    ids=["30B PTPC", "235B MXFP4"],
)
def test_plans_of_qwen3(
    sizes: dict[str, int], recipe: dict[str, object], layers: int, experts: int, gigabytes: float
) -> None:
    plan = plan_model(qwen3(sizes), request(recipe))
    assert len(plan.changed) == layers
    assert sum(module.name.endswith("experts") for module in plan.changed) == experts
    after = sum(nbytes[1] for module in plan.changed if (nbytes := module.nbytes("bfloat16")))
    assert after == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert not plan.warnings


@pytest.mark.parametrize("mtp", [False, True])
def test_plan_of_deepseek_r1(*, mtp: bool) -> None:
    plan = plan_model(deepseek({}, mtp=mtp), request(MIXED, BLOCK_FP8))
    words = {module.name: str(module.decision.config.weight) for module in plan.changed}
    assert words["model.layers.60.mlp.experts"] == "mxfp4"
    assert words["model.layers.60.mlp.shared_experts.down_proj"] == "mxfp4"
    assert words["model.layers.0.mlp.down_proj"] == "fp8_e4m3/per_channel"
    assert words["model.layers.60.self_attn.kv_b_proj"] == "fp8_e4m3/per_channel"
    assert len(words) == 61 * 5 + 3 * 3 + 58 * 4 + mtp * (5 + 4 + 2)
    assert ("model.layers.61.mlp.experts" in words) is mtp
    assert str(plan["model.layers.60.mlp.experts"].decision.source.weight) == "fp8_e4m3/block_128x128"
    for name in ("lm_head", "model.layers.60.mlp.gate"):
        assert plan[name].decision.why is Why.EXCLUDE


def test_plan_of_gpt_oss_keeps_its_mxfp4_experts() -> None:
    source = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    plan = plan_model(meta("GptOssForCausalLM", transformers.GptOssConfig()), request(PTPC, source))
    by_leaf: dict[str, set[str]] = {}
    for module in plan.modules:
        by_leaf.setdefault(module.name.rpartition(".")[2], set()).add(str(module.decision.why))
    assert by_leaf["experts"] == {"unsupported"}
    assert "a mxfp4 source is not converted" in plan["model.layers.0.mlp.experts"].decision.reason
    assert by_leaf["q_proj"] == by_leaf["o_proj"] == by_leaf["router"] == {"global"}
    assert any("model.layers.0.mlp.router" in warning for warning in plan.warnings)


def test_plan_of_gpt_oss_from_unquantized_weights() -> None:
    config = transformers.GptOssConfig()
    recipe = {**PTPC, "exclude_layer": ["lm_head", "*.router"], "layer_quant_config": {"*experts": "mxfp4"}}
    plan = plan_model(meta("GptOssForCausalLM", config), request(recipe))
    experts = [module for module in plan.changed if module.name.endswith("mlp.experts")]
    assert len(experts) == config.num_hidden_layers
    sides = config.num_local_experts * 3 * config.hidden_size * config.intermediate_size
    assert {module.nbytes("bfloat16") for module in experts} == {(2 * sides, sides * 17 // 32)}
    assert len(plan.changed) == 5 * config.num_hidden_layers
    assert not plan.warnings


def test_plan_of_llama_4() -> None:
    config = transformers.Llama4TextConfig(num_hidden_layers=4, num_local_experts=16, interleave_moe_layer_step=2)
    recipe = {"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head", "*.router"]}
    plan = plan_model(meta("Llama4ForCausalLM", config), request(recipe))
    experts = [module for module in plan.changed if module.name.endswith("feed_forward.experts")]
    assert len(experts) == len(config.moe_layers) > 0
    hidden, inner = config.hidden_size, config.intermediate_size
    values, rows = 16 * 3 * hidden * inner, 16 * (2 * inner + hidden)
    assert {module.nbytes("bfloat16") for module in experts} == {(2 * values, values + 4 * rows)}
    shared = [module for module in plan.changed if ".shared_expert." in module.name]
    assert len(shared) == 3 * len(experts)
    assert not any(module.name.endswith("router") for module in plan.changed)


SMALL_TRANSPOSED: dict[str, dict[str, object]] = {
    "GptOss": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "num_hidden_layers": 24,
    },
    "Llama4": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "num_hidden_layers": 48,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("family", SMALL_TRANSPOSED)
def test_trees_with_transposed_experts(family: str) -> None:
    """All layers of gpt-oss 20B and of Llama 4 Maverick, small sides: streamed and in memory alike."""
    kind = {"GptOss": "GptOssConfig", "Llama4": "Llama4TextConfig"}[family]
    config = getattr(transformers, kind)(**SMALL_TRANSPOSED[family])
    recipe = request({"global_quant_config": "mxfp4", "exclude_layer": ["lm_head", "*.router"]})
    empty = meta(f"{family}ForCausalLM", config)
    model = meta(f"{family}ForCausalLM", config).to_empty(device="cpu")
    fill(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = quantize_model(model, recipe, write_report=False)
    experts = [layer for layer in report.layers if layer.layer.endswith(".experts")]
    assert len(experts) == len(getattr(config, "moe_layers", range(config.num_hidden_layers)))
    assert {layer.shapes for layer in experts} == {((4, 192, 64), (4, 64, 96))}
    with OnlineQuantizer(empty, recipe, write_report=False) as quantizer:
        quantizer.load_all(tensors.items())
    assert quantizer.report.num_layers == report.num_layers
    streamed = state(empty)
    for name, tensor in state(model).items():
        if "inv_freq" not in name:  # not in a checkpoint: left on meta
            assert torch.equal(streamed[name], tensor), name
