"""Every prefix that a real engine asks for, resolved as the rules say: recorded from vLLM, one file a model."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from quant_spec import ConfigError, NameRules, QuantizationConfig, ResolveError, Why

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vllm-prefixes"
MODELS = sorted(path.stem for path in FOLDER.glob("*.txt"))
REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.experts": "mxfp4", "*.shared_experts": "mxfp8"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}


@attrs.frozen
class Recording:
    """What an engine asked for: class and prefix of each layer, and the fused modules that it announced first."""

    asked: tuple[tuple[str, str], ...]
    packed: dict[str, list[str]]


def read(model: str) -> Recording:
    asked: list[tuple[str, str]] = []
    packed: dict[str, list[str]] = {}
    for line in (FOLDER / f"{model}.txt").read_text("utf-8").splitlines():
        fields = line.split("\t")
        if fields[0] == "get_quant_method":
            asked.append((fields[1], fields[2]))
        elif fields[0] == "packed_modules_mapping":
            packed = json.loads(fields[1])
    return Recording(tuple(asked), packed)


def configured(model: str, request: dict[str, object] = REQUEST, experts: int | None = 4) -> QuantizationConfig:
    rules = NameRules(packed_modules_mapping=read(model).packed, num_experts=experts)
    return QuantizationConfig.from_online(request, names=rules)


def test_three_models_are_recorded() -> None:
    assert MODELS == ["deepseekv3", "llama", "qwen3moe"]
    assert sum(len(read(model).asked) for model in MODELS) == 47


@pytest.mark.parametrize("model", MODELS)
def test_every_prefix_has_an_answer_or_the_documented_error(model: str) -> None:
    config = configured(model)
    empty = 0
    for layer_class, prefix in read(model).asked:
        if not prefix:
            empty += 1
            assert layer_class == "VocabParallelEmbedding"
            with pytest.raises(ResolveError, match="empty module name"):
                config.resolve(prefix)
            continue
        decision = config.explain(prefix)
        leaf = prefix.rpartition(".")[2]
        expected = {
            "gate": ("none", Why.EXCLUDE),
            "lm_head": ("none", Why.EXCLUDE),
            "experts": ("mxfp4", Why.PATTERN),
        }.get(leaf, ("fp8_e4m3/per_channel", Why.GLOBAL))
        if ".shared_experts." in prefix:
            expected = ("mxfp8", Why.PATTERN)
        assert (decision.weight_word, decision.why) == expected, prefix
        assert config.resolve(prefix) == decision.config
    assert empty == (1 if model == "llama" else 0)


@pytest.mark.parametrize("model", MODELS)
def test_fused_prefixes_are_resolved_by_their_shards(model: str) -> None:
    packed = read(model).packed
    fused = [prefix for _, prefix in read(model).asked if prefix.rpartition(".")[2] in packed]
    assert {prefix.rpartition(".")[2] for prefix in fused} == set(packed)
    for prefix in fused:
        parent, _, leaf = prefix.rpartition(".")
        shards = [f"{parent}.{shard}" for shard in packed[leaf]]
        every = configured(model, {"layer_quant_config": dict.fromkeys(shards, "mxfp4")})
        decision = every.explain(prefix)
        assert decision.weight_word == "mxfp4"
        assert list(decision.members) == shards
        one = configured(model, {"global_quant_config": "ptpc_fp8", "layer_quant_config": {shards[-1]: "mxfp4"}})
        with pytest.raises(ResolveError) as caught:
            one.resolve(prefix)
        for part in (prefix, *shards, "mxfp4"):
            assert part in str(caught.value)
        by_fused_name = configured(model, {"layer_quant_config": {prefix: "mxfp4"}})
        assert by_fused_name.explain(prefix).weight_word == "mxfp4"


@pytest.mark.parametrize("model", MODELS)
def test_a_glob_over_attention_covers_the_attention_itself(model: str) -> None:
    """`self_attn.attn` holds no weight: what a glob says of it is an answer, not an error."""
    config = configured(model, {"layer_quant_config": {"*self_attn*": "mxfp4"}})
    attention = {prefix for _, prefix in read(model).asked if prefix.endswith(".attn")}
    assert len(attention) >= 2
    for prefix in attention:
        assert config.explain(prefix).weight_word == "mxfp4"


@pytest.mark.parametrize("model", ["qwen3moe", "deepseekv3"])
@pytest.mark.parametrize("experts", [None, 4])
def test_experts_by_container_by_leaf_and_by_glob(model: str, experts: int | None) -> None:
    containers = {prefix for _, prefix in read(model).asked if prefix.endswith(".experts")}
    for prefix in containers:
        for entry in (prefix, "*.experts", "*.experts.*", "re:.*experts", f"{prefix}.*"):
            config = configured(model, {"layer_quant_config": {entry: "mxfp4"}}, experts)
            assert config.explain(prefix).weight_word == "mxfp4", entry
        split = configured(model, {"global_quant_config": "mxfp4", "exclude_layer": [f"{prefix}.0.gate_proj"]}, experts)
        if experts is None:  # the one leaf that the request names is all that is known of the container
            assert split.explain(prefix).why is Why.EXCLUDE
            continue
        with pytest.raises(ResolveError, match="experts must have one format"):
            split.resolve(prefix)


@pytest.mark.parametrize("model", MODELS)
def test_in_one_pass_as_one_by_one(model: str) -> None:
    config = configured(model)
    prefixes = [prefix for _, prefix in read(model).asked if prefix]
    assert config.resolve_many(prefixes) == {prefix: config.resolve(prefix) for prefix in prefixes}
    with pytest.raises(ResolveError, match="empty"):
        config.resolve_many([*prefixes, ""])


def test_a_lost_fused_mapping_is_no_silent_default() -> None:
    """Without the engine's mapping `qkv_proj` is a name like any other; nothing is built in."""
    config = QuantizationConfig.from_online({"layer_quant_config": {"*.q_proj": "mxfp4"}})
    assert config.explain("model.layers.0.self_attn.qkv_proj").weight_word == "none"
    mapped = config.remapped(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    with pytest.raises(ResolveError):
        mapped.resolve("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(ConfigError):
        config.remapped({"": "x"})
