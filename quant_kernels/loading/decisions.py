"""Decisions: what becomes of each layer of a model in memory, settled for all layers before any weight is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.checks import dtype_name
from quant_kernels.loading.modules import TRANSPOSED, LayerView
from quant_kernels.loading.placement import LayerPlacement
from quant_kernels.loading.sources import is_plain
from quant_kernels.loading.survey import ON_UNSUPPORTED
from quant_spec import Decision, ModelPlan, ModuleInfo, PlanError, QuantFormat, QuantizationConfig, plan
from quant_spec.dtypes import FP8_E4M3FNUZ
from quant_spec.errors import nearest, shown
from quant_spec.formats import format_of_key
from quant_spec.matching import Why
from quant_spec.plan import ON_UNMATCHED, check_unmatched

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

REQUANTIZABLE: Final = ("mxfp4", "nvfp4")
"""Source formats that are kept unless `requantize_sources` names them: converting them gains nothing in precision."""
_LISTED: Final = 8
_BYTE: Final = 8


@attrs.frozen(eq=False)
class LayerPlan:
    """One layer and what becomes of it.

    Attributes:
        view: its weights.
        decision: what the config makes of it, and why.
        placement: how it is spread over ranks.
        target: format to convert it to; None: it is kept.
    """

    view: LayerView
    decision: Decision
    placement: LayerPlacement | None
    target: QuantFormat | None

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.view.name


@attrs.frozen(eq=False)
class ModelDecisions:
    """What becomes of a whole model.

    Attributes:
        config: the request.
        layers: every layer, in the model's order.
        plan: the plan it was made from: warnings, entries that fit nothing.
    """

    config: QuantizationConfig
    layers: tuple[LayerPlan, ...]
    plan: ModelPlan = attrs.field(repr=False)

    @property
    def changed(self) -> tuple[LayerPlan, ...]:
        """Layers to be converted."""
        return tuple(layer for layer in self.layers if layer.target is not None)


@attrs.frozen
class Policy:
    """What to do with layers that need a decision beyond the config.

    Attributes:
        on_unsupported: `keep` layers that cannot be converted, or `error`.
        requantize_sources: words of `REQUANTIZABLE` formats that may be converted all the same.
        scale_rounding: asked for by name; must fit some format of the model.
        fnuz: True if PTPC weights are stored as float8_e4m3fnuz.
        on_unmatched: `warn` of entries that fit no layer, or `error`.
    """

    on_unsupported: str = "keep"
    requantize_sources: tuple[str, ...] = ()
    scale_rounding: str | None = None
    fnuz: bool = False
    on_unmatched: str = "warn"

    def check(self) -> None:
        """Refuse unknown words.

        Raises:
            PlanError: one of them is unknown.
        """
        for argument, words, allowed in (
            ("on_unsupported", (self.on_unsupported,), ON_UNSUPPORTED),
            ("on_unmatched", (self.on_unmatched,), ON_UNMATCHED),
            ("requantize_sources", self.requantize_sources, REQUANTIZABLE),
        ):
            for word in words:
                if word not in allowed:
                    near = nearest(word, allowed)
                    hint = f"; did you mean {near!r}?" if near else ""
                    message = f"{argument}: found {shown(word)}; allowed: {', '.join(allowed)}{hint}"
                    raise PlanError(message)


def decide(
    views: Mapping[str, LayerView],
    config: QuantizationConfig,
    placements: Mapping[str, LayerPlacement],
    ties: Mapping[str, Collection[str]],
    policy: Policy,
) -> ModelDecisions:
    """Settle what becomes of each layer.

    Args:
        views: the layers.
        config: a request over the checkpoint's config.
        placements: how those with weights are spread.
        ties: layer -> other layers (or parameters that belong to none) that hold one of its weights too.
        policy: for what the config leaves open.

    Raises:
        ResolveError: shards or experts of a layer disagree.
        PlanError: nothing would change, a format has no conversion, a rounding fits no format, or the policy is
            `error` and a layer cannot be converted, or an entry fits none.
    """
    policy.check()
    infos = {name: _info(view, placements.get(name)) for name, view in views.items()}
    for name, info in infos.items():
        obstacle = _cut_obstacle(name, info, config, placements.get(name), policy) or _turned_obstacle(
            views[name], info, config, policy
        )
        if obstacle:
            infos[name] = attrs.evolve(info, obstacle=obstacle)
    made, decisions = _planned(infos, config, policy)
    check_unmatched(made, policy.on_unmatched)
    while found := _tied_obstacles(decisions, ties):
        for name, obstacle in found.items():
            infos[name] = attrs.evolve(infos[name], obstacle=obstacle)
        made, decisions = _planned(infos, config, policy)
    if not any(decision.changes for decision in decisions.values()):
        plan(config, infos)
        raise PlanError("the config is no request: it says how a checkpoint is stored and asks for no other format")
    layers = tuple(_layer_plan(view, decisions[name], placements.get(name), policy) for name, view in views.items())
    result = ModelDecisions(config, layers, made)
    _check_policy(result, policy)
    return result


def _layer_plan(view: LayerView, decision: Decision, placement: LayerPlacement | None, policy: Policy) -> LayerPlan:
    target = _target(decision)
    key = decision.config.weight_key
    if policy.fnuz and target is not None and target.name == "ptpc_fp8" and key is not None:
        stored = attrs.evolve(decision.config, weight=attrs.evolve(key, element=FP8_E4M3FNUZ))
        decision = attrs.evolve(decision, config=stored)
    return LayerPlan(view, decision, placement, target)


def _planned(
    infos: Mapping[str, ModuleInfo], config: QuantizationConfig, policy: Policy
) -> tuple[ModelPlan, dict[str, Decision]]:
    """Return the plan, with conversions that the policy allows in it, and its decisions by name."""
    made = plan(config, infos, allow_unchanged=True)
    decisions = {module.name: module.decision for module in made.modules}
    if policy.requantize_sources:
        for name, info in infos.items():
            decisions[name] = _allowed(name, info, decisions[name], policy)
        modules = tuple(attrs.evolve(module, decision=decisions[module.name]) for module in made.modules)
        made = attrs.evolve(made, modules=modules)
    return made, decisions


def _allowed(name: str, info: ModuleInfo, made: Decision, policy: Policy) -> Decision:
    """Return the config's decision, or a conversion where the policy allows one that the config leaves out."""
    source, wanted = made.source.weight_key, made.requested.weight
    if made.why is not Why.UNSUPPORTED or not wanted or source is None or info.obstacle:
        return made
    if str(source) not in policy.requantize_sources or info.kind_of(name) not in {"linear", "moe"}:
        return made
    target = format_of_key(wanted)
    if target is None or any(not target.check_k(size) for size in info.input_sizes()):
        return made
    why = Why.GLOBAL if made.entry is None else Why.PATTERN
    spec = attrs.evolve(made.requested, quant_method="online").resolved()
    return attrs.evolve(made, config=spec, why=why, keeps_source=False, reason="")


def _info(view: LayerView, placement: LayerPlacement | None) -> ModuleInfo:
    shapes = tuple(dict.fromkeys(placement.whole_shapes)) if placement else view.shapes
    dtypes = {slot.tensor.dtype for slot in view.slots}
    stored = dtype_name(next(iter(dtypes))) if len(dtypes) == 1 else None
    if any(slot.tensor.device.type == "meta" for slot in view.slots):
        stored = None  # what it will be loaded as, the config says
    elif len(dtypes) > 1 and all(is_plain(slot.tensor) for slot in view.slots):
        stored = "float32"
    obstacle = view.obstacle
    wide = [slot.name for slot in view.slots if dtype_name(slot.tensor.dtype) == "float64"]
    if wide:
        obstacle = f"{wide[0]} is float64; allowed: bfloat16, float16, float32"
    return ModuleInfo(
        kind=view.kind,
        class_name=view.class_name,
        shape=shapes[0] if len(shapes) == 1 else None,
        shard_shapes=shapes if len(shapes) > 1 else (),
        stored_dtype=stored,
        obstacle=obstacle,
    )


def _cut_obstacle(
    name: str, info: ModuleInfo, config: QuantizationConfig, placement: LayerPlacement | None, policy: Policy
) -> str:
    """Return why the pieces of a layer cannot be stored in the format that it would get, or an empty text."""
    if placement is None or info.obstacle or not any(place.is_cut for place in placement.places):
        return ""
    decision = _allowed(name, info, config.explain(name, info), policy)
    target = format_of_key(decision.config.weight_key) if decision.changes and decision.config.weight_key else None
    if target is None:
        return ""
    return next((text for place in placement.places if (text := place.obstacle(target))), "")


def _turned_obstacle(view: LayerView, info: ModuleInfo, config: QuantizationConfig, policy: Policy) -> str:
    """Return why codes that lie [expert, input, output] are not converted, or an empty text."""
    if info.obstacle or not any(slot.transposed for slot in view.slots):
        return ""
    decision = _allowed(view.name, info, config.explain(view.name, info), policy)
    key = decision.source.weight_key
    held = any(not is_plain(slot.tensor) for slot in view.slots)
    # Packed codes come [expert, output, input], as in the checkpoints of gpt-oss.
    packed = key is not None and key.element.bits < _BYTE and all(slot.tensor.is_meta for slot in view.slots)
    return TRANSPOSED if decision.changes and not packed and (held or key is not None) else ""


def _tied_obstacles(decisions: Mapping[str, Decision], ties: Mapping[str, Collection[str]]) -> dict[str, str]:
    found = {}
    for name, others in ties.items():
        decision = decisions.get(name)
        if decision is None or not decision.changes:
            continue
        for other in others:
            twin = decisions.get(other)
            if twin is None or not twin.changes:
                found[name] = f"it shares its weight with {other}, which is not quantized"
            elif twin.config.weight != decision.config.weight:
                found[name] = f"it shares its weight with {other}, which becomes {twin.config.weight}"
    return found


def _target(decision: Decision) -> QuantFormat | None:
    if not decision.changes:
        return None
    key = decision.config.weight_key
    found = None if key is None else format_of_key(key)
    if found is None or found.reference is None:
        message = f"{decision.name}: no conversion to {key} exists"
        raise PlanError(message)
    return found


def _check_policy(result: ModelDecisions, policy: Policy) -> None:
    kept = [layer for layer in result.layers if layer.decision.why is Why.UNSUPPORTED and layer.view.slots]
    if policy.on_unsupported == "error" and kept:
        lines = [f"  {layer.name}: {layer.decision.reason}" for layer in kept[:_LISTED]]
        more = [f"  and {len(kept) - _LISTED} more"] if len(kept) > _LISTED else []
        raise PlanError(f"{len(kept)} layers cannot be converted:\n" + "\n".join(lines + more))
    rounding = policy.scale_rounding
    if rounding is not None:
        targets = {layer.target.name: layer.target for layer in result.changed if layer.target is not None}
        allowed = tuple(dict.fromkeys(word for target in targets.values() for word in target.scale_roundings))
        if rounding not in allowed:
            choices = ", ".join(allowed) or "none: no layer becomes a format with power-of-two scales"
            message = f"scale_rounding: found {shown(rounding)}; allowed: {choices}"
            raise PlanError(message)
