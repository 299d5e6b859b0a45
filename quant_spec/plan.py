"""plan: what a config makes of a whole model, from names and shapes alone, before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import attrs

from quant_spec.arguments import check_count, check_instance, check_mapping, check_strings
from quant_spec.config import QuantizationConfig
from quant_spec.decision import QUANTIZABLE_KINDS, Decision, ModuleInfo
from quant_spec.errors import PlanError, nearest, shown
from quant_spec.formats import key_nbytes
from quant_spec.matching import Why
from quant_spec.name_hints import NameHints, did_you_mean
from quant_spec.patterns import Pattern

ROUTER_SEGMENTS: Final = frozenset({"gate", "router", "shared_expert_gate", "wg", "e_score_correction_bias"})
"""Last segments of modules that choose experts: a few values, and errors in them change which experts run."""
HEAD_SEGMENTS: Final = frozenset({"lm_head", "output_head", "embed_out"})
"""Last segments of the modules that give the logits."""
DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ON_UNMATCHED: Final = ("warn", "error")
"""What to do about entries that fit no module: say so, or refuse before anything is touched."""
_LISTED_NAMES: Final = 5


@attrs.frozen
class ModulePlan:
    """One module of a plan.

    Attributes:
        name: the module.
        info: kind, class and shape as far as they are known.
        decision: what it becomes and why.
    """

    name: str
    info: ModuleInfo
    decision: Decision

    def nbytes(self, source_dtype: str) -> tuple[int, int] | None:
        """Return the bytes of its weight before and after, scales included; None if the shape is unknown."""
        shapes = self.info.shard_shapes or ((self.info.shape,) if self.info.shape else ())
        if not shapes or any(len(shape) < 2 for shape in shapes):  # noqa: PLR2004  (a weight has two sides)
            return None
        before = after = 0
        for shape in shapes:
            plain = DTYPE_BYTES.get(source_dtype, 2)
            for size in shape:
                plain *= size
            source, final = self.decision.source.weight_key, self.decision.config.weight_key
            before += key_nbytes(source, shape) if source else plain
            after += key_nbytes(final, shape) if final else plain
        return before, after


@attrs.frozen
class ModelPlan:
    """What a config makes of a model.

    Attributes:
        config: the config that was planned.
        modules: one plan a module, in the order given.
        unmatched: entries that fit no module.
        shadowed: entries that fit modules but decide none.
        match_counts: entry as written -> modules that it fits.
        no_tensors: modules asked for that have no tensor in the checkpoint.
        warnings: what an operator should look at before starting.
        tp: tensor-parallel ranks.
    """

    config: QuantizationConfig = attrs.field(repr=False)
    modules: tuple[ModulePlan, ...]
    unmatched: tuple[Pattern, ...] = ()
    shadowed: tuple[Pattern, ...] = ()
    match_counts: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    no_tensors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tp: int = 1

    @property
    def kept(self) -> tuple[ModulePlan, ...]:
        """Modules that were asked for and are kept, each with its reason in `decision.reason`."""
        return tuple(module for module in self.modules if module.decision.why is Why.UNSUPPORTED)

    @property
    def changed(self) -> tuple[ModulePlan, ...]:
        """Modules whose weight is converted."""
        return tuple(module for module in self.modules if module.decision.changes)

    def __getitem__(self, name: str) -> ModulePlan:
        """Return the plan of one module.

        Raises:
            KeyError: the model has no module of that name.
        """
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from quant_spec.html import plan_html  # noqa: PLC0415  (for notebooks only)

        return plan_html(self)


def plan(
    config: QuantizationConfig,
    modules: Mapping[str, ModuleInfo | None] | Iterable[str],
    *,
    tensors: Collection[str] | None = None,
    tp: int = 1,
    runnable: Collection[str] | None = None,
    allow_unchanged: bool = False,
) -> ModelPlan:
    """Return what `config` makes of `modules`.

    Args:
        config: a request, or a checkpoint's config.
        modules: names, with kind and shape where they are known.
        tensors: names of all tensors of the checkpoint, or None.
        tp: tensor-parallel ranks.
        runnable: words of the weight formats that the engine can run as they are; None: all.
        allow_unchanged: True to plan a request that changes nothing.

    Raises:
        ResolveError: shards or experts of a module disagree.
        PlanError: the request changes none of the modules, or a kept module's format is not runnable.
        ArgumentError: an argument is something else.
    """
    check_instance("config", config, QuantizationConfig)
    check_count("tp", tp, least=1)
    tensors = None if tensors is None else check_strings("tensors", tensors)
    runnable = None if runnable is None else check_strings("runnable", runnable)
    known = _known(modules)
    infos: dict[str, ModuleInfo] = {}
    for name, info in known.items():
        infos[name] = info or ModuleInfo()
    made = tuple(ModulePlan(name, info, config.explain(name, info, tp=tp)) for name, info in infos.items())
    counts, deciding = _survey(config, infos)
    entries = config.matcher.entries
    unmatched = tuple(entry for index, entry in enumerate(entries) if not counts[index] and entry.text)
    result = ModelPlan(
        config,
        made,
        unmatched=unmatched,
        shadowed=tuple(each for index, each in enumerate(entries) if counts[index] and index not in deciding),
        match_counts={entry.text: counts[index] for index, entry in reversed(tuple(enumerate(entries))) if entry.text},
        no_tensors=_without_tensors(config, infos, tensors),
        warnings=(*_unmatched_warnings(unmatched, infos), *_risky_warnings(made), *_kept_warnings(made)),
        tp=tp,
    )
    if config.source is not None and not allow_unchanged:
        _check_changes(result)
    if runnable is not None:
        _check_runnable(result, runnable)
    return result


def check_unmatched(made: ModelPlan, on_unmatched: str) -> None:
    """Refuse a plan in which entries fit no module, if that is asked for.

    Args:
        made: the plan.
        on_unmatched: `warn` (nothing happens: the plan's warnings name them) or `error`.

    Raises:
        PlanError: entries fit no module, each with its path and the nearest name; or the word is unknown.
    """
    if on_unmatched not in ON_UNMATCHED:
        near = nearest(on_unmatched, ON_UNMATCHED)
        hint = f"; did you mean {near!r}?" if near else ""
        message = f"on_unmatched: found {shown(on_unmatched)}; allowed: {', '.join(ON_UNMATCHED)}{hint}"
        raise PlanError(message)
    if on_unmatched == "error" and made.unmatched:
        lines = _unmatched_warnings(made.unmatched, {module.name: module.info for module in made.modules})
        raise PlanError("\n".join(lines))


def _known(modules: Mapping[str, ModuleInfo | None] | Iterable[str]) -> Mapping[str, ModuleInfo | None]:
    if not isinstance(modules, Mapping):
        return dict.fromkeys(check_strings("modules", modules))
    check_mapping("modules", modules)
    for name, info in modules.items():
        if type(info) is not ModuleInfo:
            check_instance(f"modules[{shown(name)}]", info, ModuleInfo, none=True)
    return modules


def _survey(config: QuantizationConfig, infos: Mapping[str, ModuleInfo]) -> tuple[Counter[int], set[int]]:
    sets: Counter[frozenset[int]] = Counter()
    deciding: set[int] = set()
    for name, info in infos.items():
        fitting, first = config.matcher.survey(name, kind=info.kind_of(name), class_name=info.class_of(name))
        sets[fitting] += 1
        deciding |= first
    counts: Counter[int] = Counter()
    for fitting, times in sets.items():
        for index in fitting:
            counts[index] += times
    return counts, deciding


def _without_tensors(
    config: QuantizationConfig, infos: Mapping[str, ModuleInfo], tensors: Collection[str] | None
) -> tuple[str, ...]:
    if tensors is None:
        return ()
    owners: set[str] = set()
    for tensor in tensors:
        owner = config.names.to_module(tensor)
        while owner and owner not in owners:
            owners.add(owner)
            owner = owner.rpartition(".")[0]
    return tuple(
        name for name in infos if name not in owners and not any(shard in owners for shard in config.names.shards(name))
    )


def _unmatched_warnings(unmatched: Iterable[Pattern], infos: Mapping[str, ModuleInfo]) -> list[str]:
    entries = tuple(unmatched)
    hints = NameHints(infos if entries else ())
    return [f"{entry.path}: {entry.text!r} matches no module{did_you_mean(hints.of(entry.text))}" for entry in entries]


def _risky_warnings(modules: Iterable[ModulePlan]) -> list[str]:
    routers = [each for each in modules if each.decision.changes and each.name.rpartition(".")[2] in ROUTER_SEGMENTS]
    heads = [each for each in modules if each.decision.changes and each.name.rpartition(".")[2] in HEAD_SEGMENTS]
    return [
        *_risky(routers, "a router decides which experts run; exclude it with '*.gate.*' or by its name"),
        *_risky(heads, "the output head gives the logits; exclude it with 'lm_head' unless that is meant"),
    ]


def _risky(modules: list[ModulePlan], advice: str) -> list[str]:
    if not modules:
        return []
    entry = modules[0].decision.entry
    by = f"{entry.text!r} ({entry.path})" if entry else "the global format"
    return [f"{_names(modules)}: about to be quantized to {modules[0].decision.weight_word} by {by}: {advice}"]


def _kept_warnings(modules: Iterable[ModulePlan]) -> list[str]:
    by_reason: dict[str, list[ModulePlan]] = {}
    for module in modules:
        if module.decision.why is Why.UNSUPPORTED and module.info.kind_of(module.name) in {"linear", "moe"}:
            by_reason.setdefault(module.decision.reason, []).append(module)
    return [f"{_names(group)}: kept as {_kept_as(group[0])}: {reason}" for reason, group in by_reason.items()]


def _kept_as(module: ModulePlan) -> str:
    source = module.decision.source.weight_key
    return str(source) if source else "unquantized"


def _names(modules: list[ModulePlan]) -> str:
    listed = ", ".join(module.name for module in modules[:_LISTED_NAMES])
    return listed if len(modules) <= _LISTED_NAMES else f"{listed} and {len(modules) - _LISTED_NAMES} more"


def _check_changes(result: ModelPlan) -> None:
    if result.changed:
        return
    groups: dict[str, list[ModulePlan]] = {}
    for module in result.modules:
        if module.info.kind_of(module.name) in QUANTIZABLE_KINDS:
            groups.setdefault(str(attrs.evolve(module.decision, name="")), []).append(module)
    reasons = [f"{_names(group)}{said}" for said, group in groups.items()][: _LISTED_NAMES * 2]
    unmatched = [f"{entry.text!r} ({entry.path}) matches no module" for entry in result.unmatched]
    why = "\n".join(f"  {line}" for line in (*unmatched, *reasons))
    message = f"the request changes none of the {len(result.modules)} modules:\n{why}"
    raise PlanError(message)


def _check_runnable(result: ModelPlan, runnable: Collection[str]) -> None:
    lines = []
    for module in result.modules:
        decision = module.decision
        key = decision.source.weight_key
        if not decision.changes and key is not None and str(key) not in runnable:
            by = (
                f"{decision.why} {decision.entry.text!r} ({decision.entry.path})"
                if decision.entry
                else str(decision.why)
            )
            lines.append(
                f"{module.name}: kept as {key} ({by}), which this engine cannot run; it can run {', '.join(runnable)}"
            )
    if lines:
        raise PlanError("\n".join(lines))
