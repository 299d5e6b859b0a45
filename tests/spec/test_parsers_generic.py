"""Checkpoints' methods: readings and refusals beyond the case corpus."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from quant_spec import ConfigError, ModelFacts, QuantizationConfig
from quant_spec.parsers.base import BUILTIN_MODULES, PARSERS, REQUEST_SHAPES, ParsedQuantConfig
from quant_spec.parsers.detect import detect_method, parse_checkpoint
from quant_spec.parsers.generic.ct_presets import PRESET_NAMES, PRESETS
from quant_spec.quant_key import QuantKey
from quant_spec.schema import GENERIC, QuantSpecError, document_class, schema_for, validate

Document: TypeAlias = "dict[str, Any]"
NO_FACTS = ModelFacts()


def parsed(document: Document, facts: ModelFacts = NO_FACTS) -> ParsedQuantConfig:
    return parse_checkpoint(document, facts)


def words(found: ParsedQuantConfig) -> tuple[str, str]:
    spec = found.class_specs[0][1] if found.class_specs else found.global_spec
    return str(spec.weight or "none"), str(spec.activation or "none")


def method(name: str, **more: object) -> Document:
    return {"quant_method": name, **more}


def ct(weights: Document | None, inputs: Document | None = None, **more: object) -> Document:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return method("compressed-tensors", config_groups={"g": group}, **more)


def args(bits: int, kind: str, strategy: str | None = None, **more: object) -> Document:
    return {"num_bits": bits, "type": kind, **({"strategy": strategy} if strategy else {}), **more}


def torchao(kind: str, **data: object) -> Document:
    return method("torchao", quant_type={"default": {"_type": kind, "_version": 1, "_data": data}})


def row(name: str = "PerRow") -> Document:
    return {"_type": name, "_version": 1, "_data": {}}


def dtype(name: str) -> Document:
    return {"_type": "torch.dtype", "_data": name}


READINGS: list[tuple[Document, str, str]] = [
    (method("fp8", kv_cache_scheme="dynamic"), "fp8_e4m3/per_tensor", "fp8_e4m3/per_tensor:dynamic"),
    (method("fp8", weight_block_size=[32, 64]), "fp8_e4m3/block_32x64", "fp8_e4m3/group_64:dynamic"),
    (method("mxfp8", kv_cache_quant_algo="fp8"), "mxfp8", "mxfp8:dynamic"),
    (method("fbgemm_fp8"), "fp8_e4m3/per_channel", "fp8_e4m3/per_token:dynamic"),
    (method("gptq", bits=8, group_size=-1), "int8/per_channel", "none"),
    (method("gptq", bits=3, sym=False), "uint3/group_128", "none"),
    (method("awq", w_bit=4, q_group_size=64), "uint4/group_64", "none"),
    (method("awq", bits=4, zero_point=False, version="GEMM"), "int4/group_128", "none"),
    (method("bitsandbytes", load_in_8bit=True), "int8/per_channel", "int8/per_token:dynamic"),
    (method("hqq", quant_config={"weight_quant_params": {"nbits": 2, "group_size": 16}}), "uint2/group_16", "none"),
    (method("fp_quant", forward_dtype="nvfp4"), "nvfp4", "nvfp4:dynamic"),
    (method("auto-round", bits=4, data_type="mx_fp", act_bits=4), "mxfp4", "mxfp4:dynamic"),
    (method("auto-round", bits=4, data_type="nv_fp4"), "nvfp4", "none"),
    (method("auto-round", bits=8, data_type="fp8", act_bits=8), "fp8_e4m3/per_channel", "fp8_e4m3/per_token:dynamic"),
    (
        method("auto-round", bits=8, group_size=-1, act_bits=8, act_dynamic=False),
        "int8/per_channel",
        "int8/per_token:static",
    ),
    (method("auto-round", bits=8, group_size=0), "int8/per_tensor", "none"),
    (method("modelopt", quant_algo="fp8_pb_wo"), "fp8_e4m3/block_128x128", "none"),
    (method("modelopt", quant_algo="W4A8_AWQ"), "int4/group_128", "fp8_e4m3/per_tensor:static"),
    (method("modelopt", quant_algo="W4A16_AWQ", group_size=64), "int4/group_64", "none"),
    (method("modelopt", quant_algo="W4A8_MXFP4_FP8"), "mxfp4", "fp8_e4m3/per_tensor:static"),
    (method("modelopt", quant_algo="W8A8_SQ_PER_CHANNEL"), "int8/per_channel", "int8/per_tensor:static"),
    (method("torchao", quant_type="int8_weight_only"), "int8/per_channel", "none"),
    (torchao("Float8DynamicActivationFloat8WeightConfig"), "fp8_e4m3/per_tensor", "fp8_e4m3/per_tensor:dynamic"),
    (torchao("Float8WeightOnlyConfig", weight_dtype=dtype("float8_e5m2")), "fp8_e5m2/per_channel", "none"),
    (torchao("Int8DynamicActivationInt4WeightConfig"), "int4/group_32", "int8/per_token:dynamic"),
    (torchao("Int8DynamicActivationInt8WeightConfig"), "int8/per_channel", "int8/per_token:dynamic"),
    (torchao("Float8DynamicActivationInt4WeightConfig"), "int4/group_128", "fp8_e4m3/per_token:dynamic"),
    (torchao("NVFP4WeightOnlyConfig"), "nvfp4", "none"),
    (torchao("MXDynamicActivationMXWeightConfig", weight_dtype=dtype("float4_e2m1fn_x2")), "mxfp4", "mxfp8:dynamic"),
    (ct(args(8, "float")), "fp8_e4m3/per_tensor", "none"),
    (ct(args(4, "int", group_size=64, symmetric=False)), "uint4/group_64", "none"),
    (ct(args(5, "int", group_size=-1, symmetric=False)), "int5/per_channel", "none"),
    (
        ct(args(8, "int", "channel"), args(8, "int", "token", dynamic=True, symmetric=False)),
        "int8/per_channel",
        "int8/per_token:dynamic",
    ),
    (ct(args(8, "float", "block", block_structure="64x128")), "fp8_e4m3/block_64x128", "none"),
    (ct(args(4, "float", "group", group_size=32)), "fp4_e2m1/group_32", "none"),
    (ct(args(4, "float", "group", group_size=32), format="mxfp4-pack-quantized"), "mxfp4", "none"),
    (ct(args(6, "float", "group", group_size=32, scale_dtype="torch.uint8")), "mxfp6_e2m3", "none"),
    (ct(None), "none", "none"),
    (ct(args(4, "int", "group", group_size=128, actorder=True)), "int4/group_128", "none"),
    (method("compressed-tensors", config_groups={"w4a16_asym": ["Linear"]}), "uint4/group_128", "none"),
]


@pytest.mark.parametrize(("document", "weight", "activation"), READINGS, ids=lambda value: str(value)[:60])
def test_readings(document: Document, weight: str, activation: str) -> None:
    found = parsed(document)
    assert words(found) == (weight, activation)
    assert found.quant_method == document["quant_method"]
    config = QuantizationConfig.from_dict(document)
    assert config == QuantizationConfig.from_dict(config.to_dict())


REFUSALS: list[tuple[Document, list[str]]] = [
    (method("fp8", fmt="e5m2"), ["$.fmt", "e5m2", "e4m3"]),
    (method("fp8", weight_block_size=[128]), ["$.weight_block_size", "[rows, columns]"]),
    (method("fp8", ignored_layers="lm_head"), ["$.ignored_layers", "list"]),
    (method("fp8", ignored_layers=["re:("]), ["$.ignored_layers[0]", "re:("]),
    (method("fp8", quantized_layers={"a": {"quant_algo": "FP9"}}), ["$.quantized_layers.a.quant_algo", "FP9"]),
    (method("mxfp8", activation_scheme="static"), ["$.activation_scheme"]),
    (method("mxfp8", weight_block_size=128), ["$.weight_block_size", "list"]),
    (method("fbgemm_fp8", activation_scale_ub=0), ["$.activation_scale_ub"]),
    (method("fbgemm_fp8", activation_scale_ub="high"), ["$.activation_scale_ub", "number"]),
    (method("gptq"), ["$.bits", "missing"]),
    (method("gptq", bits=4, dynamic={"-:(": {}}), ["$.dynamic"]),
    (method("gptq", bits=4, dynamic={"a": 8}), ["$.dynamic.a", "object"]),
    (method("gptq", bits=4, group_size=-2), ["$.group_size"]),
    (method("gptq", bits=True), ["$.bits"]),
    (method("awq"), ["bits", "w_bit"]),
    (method("awq", bits=8), ["$.bits"]),
    (method("bitsandbytes"), ["load_in_4bit"]),
    (method("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf5"), ["nf5", "nf4"]),
    (method("hqq"), ["$.quant_config"]),
    (method("hqq", quant_config={"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 0}}), ["axis"]),
    (method("fp_quant", forward_dtype="int4"), ["$.forward_dtype"]),
    (method("auto-round", bits=4, data_type="mx_fp8"), ["data_type", "mx_fp8", "4 bits"]),
    (method("auto-round", bits=4, extra_config={"": {}}), ["extra_config", "empty"]),
    (method("auto-round", bits=4, extra_config={"a(": {}}), ["extra_config"]),
    (method("modelopt", quant_algo="MIXED_PRECISION"), ["quantized_layers"]),
    (method("modelopt", quant_algo="MXFP8", group_size=16), ["group_size", "32"]),
    (method("modelopt", quant_algo="FP8", quantization={"quant_algo": "FP8"}), ["quant_algo", "quantization"]),
    (
        method("modelopt", quant_algo="FP8", kv_cache_scheme={"num_bits": 4, "type": "int"}),
        ["kv_cache_scheme", "num_bits"],
    ),
    ({"quantization": {}}, ["$.quantization", "quant_algo"]),
    (method("torchao", quant_type="autoquant"), ["$.quant_type", "autoquant"]),
    (torchao("FqnToConfig"), ["fqn_to_config"]),
    (
        torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[row(), row("PerTensor")]),
        ["granularity", "PerRow"],
    ),
    (torchao("FqnToConfig", fqn_to_config={"a": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {}}}}), ["table"]),
    (ct(args(8, "float", "token", dynamic=True)), ["$.config_groups.g.weights.strategy", "token"]),
    (ct(args(8, "float", dynamic=True)), ["$.config_groups.g.weights.dynamic"]),
    (ct(args(8, "float", "token")), ["$.config_groups.g.weights.dynamic", "token"]),
    (ct(args(8, "float", "tensor", group_size=32)), ["group_size 32", "tensor"]),
    (ct(args(8, "float", "tensor", group_size=-1)), ["group_size -1"]),
    (ct(args(8, "float", block_structure=[1, 2])), ["block_structure"]),
    (ct(args(8, "float", "block", block_structure="1y2")), ["block_structure", "1y2"]),
    (ct(args(5, "float")), ["num_bits", "5"]),
    (ct(args(8, "float", actorder="random")), ["actorder"]),
    (ct(args(8, "float", dynamic="global")), ["dynamic", "local"]),
    (ct({**args(8, "float"), "bits": 8}), ["unknown key 'bits'"]),
    (ct(None, args(8, "float", "channel")), ["input_activations.strategy", "channel"]),
    (ct(None, sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "dense"]),
    (ct(None, format="marlin-24"), ["$.format", "marlin-24"]),
    (ct(None, kv_cache_scheme=args(8, "float", "attn_head")), ["kv_cache_scheme", "attn_head"]),
    (method("compressed-tensors"), ["config_groups"]),
    (method("compressed-tensors", config_groups={"g": {"targets": []}}), ["targets", "no target"]),
    (method("compressed-tensors", config_groups={"g": {"targets": ["a"], "format": "mixed-precision"}}), ["format"]),
    (method("online"), ["request"]),
    (method("targets"), ["request"]),
    (method("exl3"), ["exl3"]),
    (method("FP8"), ["FP8", "did you mean 'fp8'"]),
    ({"quant_method": 8}, ["$.quant_method", "string"]),
    ({"bits": 4}, ["quant_method", "missing"]),
]


@pytest.mark.parametrize(("document", "names"), REFUSALS, ids=lambda value: str(value)[:60])
def test_refusals(document: Document, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(document)
    assert not [name for name in names if name not in str(raised.value)], raised.value


def test_refusals_come_all_at_once_in_document_order() -> None:
    document = method("gptq", group_size=0, bits=5, sym="yes", dynamic={"a": {"bits": 9}, "(": {}})
    with pytest.raises(ConfigError) as raised:
        parsed(document)
    paths = [defect.path for defect in raised.value.defects]
    assert paths == ["$.group_size", "$.bits", "$.sym", "$.dynamic.a.bits", "$.dynamic['(']"]
    assert all("gptq.schema.json#/" in defect.rule for defect in raised.value.defects)


def test_keys_that_are_no_strings() -> None:
    with pytest.raises(ConfigError, match="no string"):
        parsed({"quant_method": "fp8", 1: 2})  # type: ignore[dict-item]


def test_unquantized() -> None:
    for document in (None, {}):
        assert detect_method(document, NO_FACTS) is None
        assert parse_checkpoint(document, NO_FACTS) == ParsedQuantConfig(None)
    with pytest.raises(ConfigError, match="object"):
        detect_method(["fp8"], NO_FACTS)  # type: ignore[arg-type]


def test_deepseek_v4_experts() -> None:
    v4 = ModelFacts(model_type="deepseek_v4")
    found = parsed(method("fp8"), v4)
    ((slot, spec),) = found.layer_pattern_specs
    assert slot.covers("layers.0.ffn.experts.3.w1")
    assert str(spec.weight) == "mxfp4"
    inside = parsed(method("fp8", expert_dtype="fp4"))
    assert inside.layer_pattern_specs[0][0].path == "$.expert_dtype"
    assert parsed(method("fp8", expert_dtype="fp8"), v4).layer_pattern_specs == ()
    with pytest.raises(ConfigError, match="fp3"):
        parsed(method("fp8"), ModelFacts(expert_dtype="fp3"))
    nvfp4 = parsed(method("fp8", moe_quant_algo="nvfp4", ignore=["head"]), v4)
    assert str(nvfp4.layer_pattern_specs[0][1].weight) == "nvfp4"
    assert nvfp4.exclude_layers == ()
    assert str(parsed(method("mxfp8", moe_quant_algo="NVFP4")).layer_pattern_specs[0][1].weight) == "nvfp4"


def test_caches() -> None:
    def cache(document: Document) -> str:
        return str(parsed(document).kv_cache)

    assert cache(method("fp8", kv_cache_scheme="dynamic")) == "fp8_e4m3/per_tensor:dynamic"
    assert cache(method("modelopt", quant_algo="FP8", kv_cache_scheme="static")) == "fp8_e4m3/per_tensor:static"
    assert cache(method("modelopt", quant_algo="FP8", kv_cache_scheme={"num_bits": 8})) == "int8/per_tensor:static"
    nvfp4 = {"num_bits": 4, "type": "float", "dynamic": True}
    assert cache(method("modelopt", quant_algo="FP8", kv_cache_scheme=nvfp4)) == "nvfp4:dynamic"
    assert cache(ct(None, kv_cache_scheme=args(8, "float", dynamic=True))) == "fp8_e4m3/per_tensor:dynamic"


def test_tables_of_torchao_keep_exact_names_first() -> None:
    table = {
        "re:a.*": {"_type": "Int8WeightOnlyConfig", "_data": {}},
        "a.b.weight": {"_type": "Int4WeightOnlyConfig", "_data": {}},
    }
    found = parsed(torchao("ModuleFqnToConfig", module_fqn_to_config={**table, "c": None, "_default": None}))
    assert [entry.target for entry, _ in found.layer_pattern_specs] == ["a.b", "a.*"]
    assert [entry.text for entry in found.exclude_layers] == ["c"]
    assert words(found) == ("none", "none")


def test_gptq_lists_are_excluded_too() -> None:
    found = parsed(method("gptq", bits=4, modules_to_not_convert=["lm_head", ""]))
    assert [entry.text for entry in found.exclude_layers] == ["lm_head"]


def words_at(document: Document, name: str) -> str:
    decision = QuantizationConfig.from_dict(document).explain(name)
    return f"{decision.weight_word} {decision.why}"


def test_gptq_whitelists_and_heads() -> None:
    blocks = [["self_attn.q_proj", "self_attn.k_proj"], "mlp.down_proj"]
    document = method("gptq", bits=4, modules_in_block_to_quantize=blocks, dynamic={".*o_proj": {"bits": 8}})
    assert words_at(document, "model.layers.0.self_attn.q_proj") == "int4/group_128 global"
    assert words_at(document, "model.layers.0.mlp.down_proj") == "int4/group_128 global"
    assert words_at(document, "model.layers.0.mlp.up_proj") == "none global"
    assert words_at(document, "model.layers.0.self_attn.o_proj") == "int8/group_128 pattern"
    head = method("gptq", bits=4, lm_head=False)
    assert words_at(head, "lm_head") == "none global"
    assert words_at(head, "model.layers.0.mlp.up_proj") == "int4/group_128 global"
    assert words_at({**head, "dynamic": {"lm_head": {"bits": 8}}}, "lm_head") == "int8/group_128 pattern"
    assert words_at({**head, "lm_head": True}, "lm_head") == "int4/group_128 global"
    with pytest.raises(ConfigError, match="modules_in_block_to_quantize"):
        parsed(method("gptq", bits=4, modules_in_block_to_quantize="q_proj"))


@pytest.mark.parametrize("blocks", ["model.layers, visual.blocks", ["model.layers", "visual.blocks"]])
def test_auto_round_quantizes_its_blocks_alone(blocks: object) -> None:
    document = method("auto-round", bits=4, block_name_to_quantize=blocks, extra_config={"lm_head": {"bits": 8}})
    assert words_at(document, "model.layers.0.mlp.up_proj") == "int4/group_128 global"
    assert words_at(document, "visual.blocks.0.attn.qkv") == "int4/group_128 global"
    assert words_at(document, "model.layers_extra.0.proj") == "none global"
    assert words_at(document, "model.projector") == "none global"
    assert words_at(document, "lm_head") == "int8/group_128 pattern"
    assert words_at(method("auto-round", bits=4, block_name_to_quantize=""), "lm_head") == "int4/group_128 global"


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_are_those_of_compressed_tensors(name: str) -> None:
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    scheme = schemes.preset_name_to_scheme(name, ["Linear"])
    written = {"config_groups": {"g": scheme.model_dump(mode="json", exclude_none=True)}}
    ours = parsed(method("compressed-tensors", config_groups={name: ["Linear"]}))
    theirs = parsed(method("compressed-tensors", **written))
    assert words(ours) == words(theirs)
    assert ours.tensor_names == theirs.tensor_names


def test_every_preset_is_known() -> None:
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    assert set(PRESETS) == set(schemes.PRESET_SCHEMES) - {"UNQUANTIZED"}


class TestRegistry:
    """Parsers and schemas by method."""

    def test_every_built_in_parser_has_a_schema_and_loads(self) -> None:
        assert set(GENERIC) == set(BUILTIN_MODULES) - {*REQUEST_SHAPES, "quark"}
        for name in BUILTIN_MODULES:
            assert PARSERS.find(name) is not None
            assert document_class(name).__doc__
            assert schema_for(name)["$id"] == f"{name}.schema.json"

    def test_unknown_kinds(self) -> None:
        with pytest.raises(QuantSpecError, match="did you mean 'quark'"):
            schema_for("quarck")

    def test_generic_dispatches_by_method(self) -> None:
        assert validate(method("fp8", weight_block_size=[128, 0]), "generic")
        assert validate({"load_in_4bit": True, "load_in_8bit": True}, "generic")
        assert validate({"quantization": {}}, "generic")
        for kind in GENERIC:
            for example in getattr(document_class(kind), "EXAMPLES", ()):
                assert validate(example, "generic") == []

    def test_a_defect_of_the_schema_alone_is_added(self) -> None:
        large = {"exclude_layer": ["a"] * 200_000 + [1]}
        with pytest.raises(ConfigError) as raised:
            QuantizationConfig.from_online(large)
        assert [(each.path, each.rule) for each in raised.value.defects] == [("$.exclude_layer[200000]", "")]


def test_keys_are_words() -> None:
    assert QuantKey.parse("nvfp4").second_scale is not None
