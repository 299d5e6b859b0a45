"""Our reading of real exporters' configs against the tensors that they stored, and against what an engine asks for."""

from __future__ import annotations

import pytest
from fixture_files import (
    SCALE,
    checkpoints,
    packed_modules,
    prefixes,
    quantization_config,
    stored_word,
    tensors,
    weights,
)

from quant_spec import ModuleInfo, NameRules, QuantizationConfig, ResolveError, scale_tensors

NO_LINEAR = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "q_a_layernorm"}
NO_LINEAR |= {"kv_a_layernorm", "gate", "e_score_correction_bias"}
STACKED = {"experts.gate_up_proj", "experts.down_proj"}
MODELS = ("llama", "qwen3moe", "deepseekv3")


@pytest.mark.parametrize("name", checkpoints())
def test_every_stored_tensor_has_the_format_that_we_read(name: str) -> None:
    stored = tensors(name)
    config = QuantizationConfig.from_dict(quantization_config(name), names=NameRules(tensors=stored))
    quantized = 0
    for module, weight in weights(stored).items():
        word = stored_word(weight, stored.get(f"{module}.{SCALE}"))
        info = ModuleInfo(shape=weight.shape, stored_dtype=weight.dtype)
        assert config.explain(module, info).weight_word == word, module
        quantized += word != "none"
        alone = str(config.resolve(module).weight or "none")
        last = module.rpartition(".")[2]
        if word != "none" or (last not in NO_LINEAR and not any(module.endswith(each) for each in STACKED)):
            assert alone == word, f"{module}: from the config alone"
    assert quantized >= 8
    parts = {tensor.rpartition(".")[2] for tensor in stored if f"{tensor.rpartition('.')[0]}.{SCALE}" in stored}
    assert parts == set(config.tensor_names) - {"bias"}
    found = scale_tensors(config, {tensor: value.dtype for tensor, value in stored.items()})
    assert set(found.values()) == {tensor for tensor in stored if tensor.endswith(f".{SCALE}")}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", checkpoints())
def test_every_prefix_that_an_engine_asks_for_resolves(name: str, model: str) -> None:
    packed = packed_modules(model)
    leaves = ("gate_proj", "up_proj", "down_proj")
    rules = NameRules(packed_modules_mapping=packed, num_experts=4, expert_leaves=leaves)
    config = QuantizationConfig.from_dict(quantization_config(name), names=rules)
    plain = QuantizationConfig.from_dict(quantization_config(name))
    asked = prefixes(model)
    for _, prefix in asked:
        if not prefix:
            with pytest.raises(ResolveError, match="empty"):
                config.resolve(prefix)
            continue
        parent, _, last = prefix.rpartition(".")
        members = [f"{parent}.{shard}" for shard in packed.get(last, ())]
        if last == "experts":
            members = [f"{prefix}.{expert}.{leaf}" for expert in range(4) for leaf in leaves]
        for member in members or [prefix]:
            assert config.resolve(prefix) == plain.resolve(member), f"{prefix} against {member}"
    named = [prefix for _, prefix in asked if prefix]
    assert config.resolve_many(named) == {prefix: config.resolve(prefix) for prefix in named}
