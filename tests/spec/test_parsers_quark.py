"""AMD Quark's objects: schemes, stages, classes, and the KV cache among the layers."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from quant_spec import ConfigError, ModelFacts, ModuleInfo, QuantizationConfig
from quant_spec.parsers.base import ParsedQuantConfig, get_parser

Document: TypeAlias = "dict[str, Any]"


def tensor(dtype: str, qscheme: str | None = "per_tensor", **more: object) -> Document:
    return {"dtype": dtype, "qscheme": qscheme, **more}


def quark(weight: object = None, inputs: object = None, **more: object) -> Document:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}, **more}


def parsed(document: Document) -> ParsedQuantConfig:
    return get_parser("quark").parse(document, ModelFacts())


FP8 = tensor("fp8_e4m3")
ROW = tensor("fp8_e4m3", "per_channel", ch_axis=0)
GROUP16 = tensor("fp4", "per_group", group_size=16)
STATIC = {"weight": FP8, "input_tensors": FP8, "output_tensors": FP8}

READINGS = [
    (
        ROW,
        tensor("fp8_e4m3", "per_channel", ch_axis=1, is_dynamic=True),
        "fp8_e4m3/per_channel",
        "fp8_e4m3/per_token:dynamic",
    ),
    (ROW, tensor("fp8_e4m3", is_dynamic=True), "fp8_e4m3/per_channel", "fp8_e4m3/per_tensor:dynamic"),
    (tensor("bfloat16", None), tensor("float16", None), "none", "none"),
    (tensor("mx", "per_group", group_size=32, mx_element_dtype="fp6_e2m3"), None, "mxfp6_e2m3", "none"),
    (None, tensor("mx", "per_group", group_size=32, mx_element_dtype="fp4", is_dynamic=True), "none", "mxfp4:dynamic"),
    ([], [], "none", "none"),
    ([GROUP16, FP8], [{**GROUP16, "is_dynamic": True}, FP8], "nvfp4", "nvfp4:dynamic"),
    ([FP8, tensor("int4", "per_channel")], FP8, "int4/per_channel", "fp8_e4m3/per_tensor:static"),
    (
        tensor("fp8_e4m3", "per_block", block_size=[128, 128], scale_format="e8m0"),
        None,
        "fp8_e4m3/block_128x128",
        "none",
    ),
    (tensor("int8", "per_channel", symmetric=False), None, "int8/per_channel", "none"),
]


@pytest.mark.parametrize(("weight", "inputs", "first", "second"), READINGS)
def test_readings(weight: object, inputs: object, first: str, second: str) -> None:
    spec = parsed(quark(weight, inputs)).global_spec
    assert (str(spec.weight or "none"), str(spec.activation or "none")) == (first, second)


SCALES = [
    ({}, None),
    ({"scale_type": "float"}, None),
    ({"scale_type": "float32"}, "fp32"),
    ({"scale_type": "pof2"}, "ue8m0"),
    ({"scale_type": "float8_e8m0fnu"}, "e8m0"),
    ({"scale_type": "float8_e8m0fnu", "scale_format": "e8m0"}, "e8m0"),
    ({"scale_type": "float", "scale_format": "e8m0"}, "ue8m0"),
]


@pytest.mark.parametrize(("given", "dtype"), SCALES)
def test_dtype_of_block_scales(given: Document, dtype: str | None) -> None:
    weight = parsed(quark(tensor("fp8_e4m3", "per_block", block_size=[128, 128], **given))).global_spec.weight_key
    assert weight is not None
    assert (str(weight.scale.dtype) if weight.scale.dtype else None) == dtype


def test_int4_inside_fp8_has_two_scales() -> None:
    found = parsed(quark([FP8, tensor("int4", "per_channel")]))
    key = found.global_spec.weight_key
    assert key is not None
    assert str(key.second_scale) == "unknown per_tensor"
    assert found.tensor_names == ("weight", "weight_scale", "weight_scale_2")


def test_classes_come_after_patterns_and_before_global() -> None:
    document = quark(ROW, layer_type_quant_config={"<class 'torch.nn.Conv1d'>": {"weight": FP8}, "Linear": None})
    config = QuantizationConfig.from_dict(document)
    found = config.explain("model.conv", ModuleInfo(class_name="Conv1d"))
    assert (found.weight_word, str(found.why)) == ("fp8_e4m3/per_tensor", "global")
    assert config.explain("model.proj").weight_word == "none"
    assert config.explain("model.other", ModuleInfo(class_name="Other")).weight_word == "fp8_e4m3/per_channel"


def test_null_layers_are_unquantized() -> None:
    found = parsed(quark(ROW, layer_quant_config={"a": None, "b": {}}))
    assert [spec.weight for _, spec in found.layer_pattern_specs] == [None, None]


def test_cache_of_newer_files() -> None:
    found = parsed(
        quark(ROW, kv_cache_quant_config={"*k_proj": {"output_tensors": FP8}, "*v_proj": {"output_tensors": [FP8]}})
    )
    assert str(found.kv_cache) == "fp8_e4m3/per_tensor:static"
    assert found.tensor_names[-1] == "output_scale"


def test_cache_group_by_glob() -> None:
    layers = {"model.layers.0.self_attn.k_proj": STATIC}
    found = parsed(quark(FP8, layer_quant_config=layers, export={"kv_cache_group": ["*k_proj", ""]}))
    assert str(found.kv_cache) == "fp8_e4m3/per_tensor:static"


REFUSED: list[tuple[Document, list[str]]] = [
    (quark({"dtype": "fp8_e4m3"}), ["$.global_quant_config.weight.qscheme", "needed"]),
    (quark(tensor("fp8_e4m3", "per_block")), ["weight.block_size"]),
    (quark(tensor("fp4", "per_group")), ["weight.group_size"]),
    (quark(tensor("mx", "per_group", group_size=32)), ["mx_element_dtype"]),
    (quark(tensor("mx6")), ["$.global_quant_config.weight.dtype", "mx6"]),
    (quark(tensor("fp8_e4m3", is_dynamic=True)), ["weight.is_dynamic"]),
    (quark(None, ROW), ["input_tensors.is_dynamic", "per token"]),
    (quark([FP8, FP8]), ["$.global_quant_config.weight", "stages", "fp8_e4m3 per_tensor then"]),
    (quark([GROUP16, FP8, FP8]), ["stages"]),
    (quark([ROW, tensor("int4", "per_channel")]), ["stages"]),
    (quark("fp8"), ["$.global_quant_config.weight", "object", "list"]),
    (quark(exclude="lm_head"), ["$.exclude", "list"]),
    (quark(layer_quant_config={"": {}}), ["empty pattern"]),
    (quark(export={"kv_cache_group": "*k_proj"}), ["kv_cache_group", "list"]),
    (quark(layer_quant_config={"*k_proj": STATIC}), ["$.layer_quant_config['*k_proj'].output_tensors"]),
    (quark(layer_quant_config={"*k": {}}, export={"kv_cache_group": ["*k"]}), ["no output_tensors"]),
    (quark(kv_cache_quant_config={"*k": None}), ["no output_tensors"]),
]


@pytest.mark.parametrize(("document", "names"), REFUSED)
def test_refused(document: Document, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(document)
    assert not [name for name in names if name not in str(raised.value)], raised.value


def test_caches_that_differ() -> None:
    other = {"output_tensors": tensor("int8", is_dynamic=True)}
    layers = {"*k_proj": STATIC, "*v_proj": other}
    with pytest.raises(ConfigError, match="differ") as raised:
        parsed(quark(FP8, layer_quant_config=layers, export={"kv_cache_group": ["*k_proj", "*v_proj"]}))
    assert "int8/per_tensor:dynamic" in str(raised.value)


def test_defects_of_different_layers_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(quark([FP8, FP8], layer_quant_config={"a": {"weight": [ROW, ROW]}}))
    assert [each.path for each in raised.value.defects] == [
        "$.global_quant_config.weight",
        "$.layer_quant_config.a.weight",
    ]
