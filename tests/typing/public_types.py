"""What a type checker must infer of the public names: checked by mypy --strict and by pyright, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import assert_type

from quant_spec import (
    UNSET,
    ConfigError,
    Decision,
    Defect,
    LayerQuantConfig,
    ModelFacts,
    ModelPlan,
    ModuleInfo,
    ModulePlan,
    NameRules,
    ParsedQuantConfig,
    Pattern,
    QuantFormat,
    QuantizationConfig,
    QuantKey,
    QuantParser,
    RowRange,
    ScaleDesc,
    Unset,
    Why,
    format_of_key,
    formats,
    get_format,
    get_parser,
    plan,
    register_format,
    register_quant_parser,
    scale_tensors,
    shard_rows,
    weight_scale_of,
)
from quant_spec.backends import BACKENDS, Backend, BackendRegistry, select_backend
from quant_spec.dtypes import ElementType

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def absent_null_and_a_value(config: LayerQuantConfig) -> str:
    """The three are told apart by `is`, and nothing else is left."""
    activation = config.activation
    if activation is UNSET:
        assert_type(bool(activation), bool)
        return "absent"
    if activation is None:
        return "null"
    assert_type(activation, QuantKey)
    return str(activation)


def a_key(key: QuantKey, other: QuantKey) -> None:
    assert_type(QuantKey.parse("mxfp4"), QuantKey)
    assert_type(key.element, ElementType)
    assert_type(key.scale, ScaleDesc)
    assert_type(key.second_scale, ScaleDesc | None)
    assert_type(key.group_size, int | None)
    assert_type(key.as_activation(dynamic=True), QuantKey)
    assert_type(key < other, bool)
    assert_type(sorted([key]), list[QuantKey])


def a_layer(layer: LayerQuantConfig) -> None:
    assert_type(layer.resolved(), LayerQuantConfig)
    assert_type(layer.weight_key, QuantKey | None)
    assert_type(layer.quant_type, str)
    assert_type(layer.is_dynamic, bool)


def a_dtype(layer: LayerQuantConfig) -> torch.dtype:
    return layer.quant_dtype


def a_config(document: Mapping[str, object], request: object) -> None:
    source = QuantizationConfig.from_dict(document, facts=ModelFacts(), names=NameRules(num_experts=8))
    assert_type(source, QuantizationConfig)
    config = QuantizationConfig.from_online(request, source=source, shorthand=None)
    assert_type(config, QuantizationConfig)
    assert_type(config.remapped({"a": "b"}, {"f": ["x"]}), QuantizationConfig)
    assert_type(config.with_excludes("a", "b"), QuantizationConfig)
    assert_type(config.resolve("a"), LayerQuantConfig)
    assert_type(config.resolve_many(["a"]), dict[str, LayerQuantConfig])
    assert_type(config.explain("a", ModuleInfo(kind="moe"), tp=2), Decision)
    assert_type(config.unmatched(["a"]), tuple[Pattern, ...])
    assert_type(config.digest(), str)
    assert_type(config.to_dict(), dict[str, object] | None)
    assert_type(config.exclude_layers, tuple[Pattern, ...])
    assert_type(config.layer_pattern_specs, tuple[tuple[Pattern, LayerQuantConfig], ...])
    assert_type(config.explain("a").why, Why)
    assert_type(config.explain("a").entry, Pattern | None)


def a_plan(config: QuantizationConfig) -> None:
    found = plan(config, {"a": ModuleInfo(shape=(2, 4)), "b": None}, tensors=["a.weight"], tp=2, runnable=["mxfp4"])
    assert_type(found, ModelPlan)
    assert_type(plan(config, ["a"]), ModelPlan)
    assert_type(found.kept, tuple[ModulePlan, ...])
    assert_type(found["a"].nbytes("bfloat16"), tuple[int, int] | None)
    assert_type(shard_rows(ModuleInfo(), block_rows=128), RowRange)
    assert_type(scale_tensors(config, {"a.weight": None}), dict[str, str])
    assert_type(weight_scale_of("a", ["a.weight_scale"]), str | None)


def formats_and_backends(layer: LayerQuantConfig, key: QuantKey) -> None:
    assert_type(formats(), tuple[QuantFormat, ...])
    assert_type(get_format("mxfp4"), QuantFormat)
    assert_type(register_format(get_format("mxfp4")), QuantFormat)
    assert_type(format_of_key(key), QuantFormat | None)
    assert_type(select_backend(layer, kind="moe", architecture="gfx950", registry=BackendRegistry()), Backend)
    assert_type(next(iter(BACKENDS)), Backend)


def errors(error: ConfigError) -> None:
    assert_type(error.defects, tuple[Defect, ...])
    assert_type(error.path, str)
    assert_type(error.value, object)


@register_quant_parser("typed")
class TypedParser:
    """A third party's parser: the decorator keeps its type, and the class is what the registry takes."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:
        return ParsedQuantConfig(facts.model_type or str(document["quant_method"]))


def parsers() -> None:
    assert_type(get_parser("fp8"), QuantParser)
    assert_type(TypedParser(), TypedParser)


def unset() -> None:
    assert_type(next(iter(Unset)), Unset)
