"""From a case's fields to configs, modules and tensors."""

from __future__ import annotations

from typing import Any

from quant_spec import ModelFacts, ModuleInfo, NameRules, QuantizationConfig
from quant_spec.documents import load_json


def facts_of(data: dict[str, Any]) -> ModelFacts:
    model = data.get("hf_config") or {}
    return ModelFacts(
        model_type=model.get("model_type"),
        torch_dtype=model.get("torch_dtype") or "bfloat16",
        expert_dtype=model.get("expert_dtype"),
        config_file=data.get("config_file") or "config.json",
    )


def names_of(data: dict[str, Any]) -> NameRules:
    model = data.get("model") or {}
    given: dict[str, Any] = {}
    if "expert_leaves" in model:
        given["expert_leaves"] = tuple(model["expert_leaves"])
    return NameRules(
        packed_modules_mapping=data.get("packed_modules_mapping") or {},
        name_mapping=data.get("name_mapping") or {},
        num_experts=model.get("num_experts"),
        tensors=data.get("tensors"),
        **given,
    )


def parse(data: dict[str, Any]) -> QuantizationConfig:
    """Parse the checkpoint's object and, if there is one, the request over it."""
    source = QuantizationConfig.from_dict(data.get("quantization_config"), facts=facts_of(data), names=names_of(data))
    text = data.get("config_text")
    request = load_json(text) if text is not None else data.get("online_quant_config")
    shorthand = data.get("vllm_quantization")
    if request is None and shorthand is None:
        return source
    return QuantizationConfig.from_online(request, source=source, shorthand=shorthand)


def parse_dumped(config: QuantizationConfig, data: dict[str, Any]) -> QuantizationConfig:
    """Dump a config and parse what was dumped."""
    if config.source is None:
        return QuantizationConfig.from_dict(config.to_dict(), facts=facts_of(data), names=names_of(data))
    source = parse_dumped(config.source, data)
    dumped = config.to_dict()
    assert dumped is not None
    return QuantizationConfig.from_online(dumped["request"], source=source, shorthand=dumped["shorthand"])  # type: ignore[arg-type]


def module_of(entry: dict[str, Any]) -> ModuleInfo:
    shape = entry.get("shape")
    return ModuleInfo(
        kind=entry.get("kind"),
        class_name=entry.get("class"),
        shape=tuple(shape) if shape else None,
        shard_shapes=tuple(tuple(each) for each in entry.get("shard_shapes") or ()),
        parallel=entry.get("parallel"),
    )


def modules_of(data: dict[str, Any]) -> dict[str, ModuleInfo]:
    return {name: module_of(entry) for name, entry in (data.get("modules") or {}).items()}


def tensors_of(data: dict[str, Any]) -> dict[str, str | None]:
    return {name: entry.get("dtype") for name, entry in (data.get("tensors") or {}).items()}


def ranks_of(data: dict[str, Any]) -> int:
    return int((data.get("tp") or {}).get("size") or 1)
