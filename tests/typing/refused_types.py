"""What a type checker must refuse: each ignored line is an error, and one that is none is reported as such."""

from __future__ import annotations

from quant_spec import LayerQuantConfig, ModuleInfo, NameRules, QuantizationConfig, plan
from quant_spec.backends import select_backend


def wrong(config: QuantizationConfig, layer: LayerQuantConfig) -> None:
    config.quant_method = "fp8"  # type: ignore[misc]
    config.resolve(3)  # type: ignore[arg-type]
    config.resolve("a").weight = None  # type: ignore[misc]
    config.with_excludes(["a"])  # type: ignore[arg-type]
    config.explain("a", tp="2")  # type: ignore[arg-type]
    ModuleInfo(kind="router")  # type: ignore[arg-type]
    ModuleInfo(parallel="both")  # type: ignore[arg-type]
    LayerQuantConfig("mxfp4")  # type: ignore[arg-type]
    NameRules(num_experts="8")  # type: ignore[arg-type]
    QuantizationConfig.from_dict("fp8")  # type: ignore[arg-type]
    QuantizationConfig.from_online({}, source={})  # type: ignore[arg-type]
    plan(config, ["a"], tp=None)  # type: ignore[arg-type]
    select_backend(layer, kind="attention", architecture="gfx950")  # type: ignore[arg-type]
    select_backend(layer, kind="moe")  # type: ignore[call-arg]
    config.resolve("a").nothing  # type: ignore[attr-defined]  # noqa: B018  (an attribute that is not there)
