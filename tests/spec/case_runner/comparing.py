"""What came out against what must come out. Every difference is found, not only the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from case_runner.building import modules_of, ranks_of
from quant_spec import QuantKey, shard_rows
from quant_spec.granularity import PerBlock
from quant_spec.layer_config import word

if TYPE_CHECKING:
    from quant_spec import Decision, ModelPlan, QuantizationConfig


class Differences:
    """Collects what differs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def equal(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.lines.append(f"{what}: found {found!r}, expected {expected!r}")

    def check(self) -> None:
        assert not self.lines, "\n".join(self.lines)


def compare_config(config: QuantizationConfig, expect: dict[str, Any], differ: Differences) -> None:
    decision = config.global_decision()
    if "quant_method" in expect:
        differ.equal("quant_method", config.quant_method or "", expect["quant_method"])
    for side in expect.get("global") or {}:
        differ.equal(f"global.{side}", getattr(decision, f"{side}_word"), expect["global"][side])
    scales = scales_of(decision)
    for side in expect.get("scales") or {}:
        differ.equal(f"scales.{side}", scales[side], expect["scales"][side])
    if "kv_cache" in expect:
        differ.equal("kv_cache", str(config.kv_cache) if config.kv_cache else None, expect["kv_cache"])
    if "tensor_names" in expect:
        differ.equal("tensor_names", sorted(config.tensor_names), sorted(expect["tensor_names"]))


def scales_of(decision: Decision) -> dict[str, str | None]:
    weight, activation = decision.requested.weight, decision.requested.activation
    second = weight.second_scale if isinstance(weight, QuantKey) else None
    return {
        "weight": str(weight.scale.dtype) if isinstance(weight, QuantKey) and weight.scale.dtype else None,
        "activation": str(activation.scale.dtype)
        if isinstance(activation, QuantKey) and activation.scale.dtype
        else None,
        "second": str(second) if second else None,
    }


def compare_layers(config: QuantizationConfig, data: dict[str, Any], differ: Differences) -> None:
    modules = modules_of(data)
    for layer in (data.get("expect") or {}).get("layers") or ():
        name = layer["name"]
        decision = config.explain(name, modules.get(name), tp=ranks_of(data))
        found = {
            "weight": decision.weight_word,
            "activation": decision.activation_word,
            "why": str(decision.why),
            "pattern": decision.entry.text if decision.entry else None,
            "source_weight": word(decision.source.weight),
            "source_activation": word(decision.source.activation),
        }
        for key, value in found.items():
            if key in layer:
                differ.equal(f"{name}: {key}", value, layer[key])
        if name not in modules:
            differ.equal(f"{name}: resolve", config.resolve(name), decision.config)
            differ.equal(f"{name}: resolve_many", config.resolve_many([name]), {name: decision.config})


def compare_plan(config: QuantizationConfig, made: ModelPlan, data: dict[str, Any], differ: Differences) -> None:
    expect = data.get("expect") or {}
    report = expect.get("report") or {}
    for key in ("unmatched", "shadowed"):
        if key in report:
            differ.equal(f"report.{key}", sorted(entry.text for entry in getattr(made, key)), sorted(report[key]))
    for entry, count in (report.get("match_counts") or {}).items():
        differ.equal(f"report.match_counts[{entry!r}]", made.match_counts.get(entry), count)
    if "no_tensors" in report:
        differ.equal("report.no_tensors", sorted(made.no_tensors), sorted(report["no_tensors"]))
    kept = {module.name: module.decision.reason for module in made.kept}
    for each in report.get("kept") or ():
        reason = kept.get(each["name"], "")
        missing = [text for text in each.get("must_name") or () if text.lower() not in reason.lower()]
        differ.equal(f"report.kept[{each['name']}] ({reason!r})", (each["name"] in kept, missing), (True, []))
    for each in expect.get("plan") or ():
        compare_rows(config, each, data, differ)


def compare_rows(config: QuantizationConfig, each: dict[str, Any], data: dict[str, Any], differ: Differences) -> None:
    source = config.source or config
    weight = source.resolve(each["name"]).weight
    assert isinstance(weight, QuantKey), f"{each['name']} is not quantized in the checkpoint"
    granularity = weight.scale.granularity
    block = granularity.rows if isinstance(granularity, PerBlock) else 1
    module = modules_of(data)[each["name"]]
    found = shard_rows(module, block_rows=block, tp=ranks_of(data), rank=each["rank"], shard=each["shard"])
    where = f"plan[{each['name']}, rank {each['rank']}, shard {each['shard']}]"
    differ.equal(f"{where}.rows", list(found.rows), each["rows"])
    differ.equal(f"{where}.scale_rows", list(found.scale_rows), each["scale_rows"])
