"""The entries of a report, from a plan and from what converting took."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.inventory import SCALE_SUFFIXES
from quant_kernels.loading.shard_layout import part_nbytes
from quant_kernels.loading.steps import WeightStep
from quant_spec.decision import QUANTIZABLE_KINDS
from quant_spec.layer_config import word
from quant_spec.matching import Why
from quant_spec.name_hints import NameHints
from quant_spec.report import KeptLayer, LayerReport, OtherModules, Rule, UnmatchedEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from quant_kernels.loading.job import Job
    from quant_kernels.loading.survey import Survey
    from quant_kernels.loading.transfer import Converted
    from quant_spec.decision import Decision
    from quant_spec.patterns import Pattern
    from quant_spec.plan import ModulePlan

_REASONS: Final = {
    Why.EXCLUDE: "excluded",
    Why.PATTERN: "the entry leaves it as it is",
    Why.GLOBAL: "no entry names it, and there is no global format",
    Why.ALREADY: "already in the format asked for",
}
PACKED_BITS: Final = 4
DTYPE_OF_PACKED: Final = "torch.uint8"
"""What reports call the dtype of packed 4-bit codes."""


def rule_of(decision: Decision, request: object) -> Rule:
    """Return the rule of a report: the entry that decided, where it stands, and what the request says there."""
    entry = decision.entry
    why = str(decision.why)
    if entry is None:
        return _global_rule(why, request)
    section = entry.path.removeprefix("$").lstrip(".").partition("[")[0].partition(".")[0]
    holder = request.get(section) if isinstance(request, dict) else None
    value = holder.get(entry.text) if isinstance(holder, dict) else None
    if value is None and entry.text == section:
        value = holder
    return Rule(why, entry.text, entry.path, value)


def _global_rule(why: str, request: object) -> Rule:
    for key in ("global_quant_config", "linear"):
        if isinstance(request, dict) and request.get(key):
            return Rule(why, None, f"$.{key}", request[key])
    return Rule(why)


def quantized_layers(job: Job, spent: Mapping[str, Converted], *, kernel: str) -> tuple[LayerReport, ...]:
    """Return one entry for each quantized layer.

    Args:
        job: what was done.
        spent: layer -> what converting it took.
        kernel: `native` or `reference`.
    """
    steps: dict[str, list[WeightStep]] = defaultdict(list)
    for each in job.steps.values():
        for step in each:
            if isinstance(step, WeightStep):
                steps[step.layer].append(step)
    request = requested(job.survey)
    return tuple(
        _layer(job.survey, module, steps[module.name], spent[module.name], request, kernel)
        for module in job.survey.changed
    )


def requested(survey: Survey) -> object:
    """Return the request as it was given."""
    document = survey.config.to_dict()
    return document.get("request") if document and survey.config.source is not None else None


def _layer(
    survey: Survey, module: ModulePlan, steps: list[WeightStep], spent: Converted, request: object, kernel: str
) -> LayerReport:
    config = module.decision.config
    sqnr = None
    if spent.signal:
        sqnr = 10 * math.log10(spent.signal / spent.noise) if spent.noise else None
    return LayerReport(
        layer=module.name,
        quant_type=config.quant_type,
        quant_dtype=quant_dtype_name(config.element.torch_name, config.element.bits),
        source=survey.source_word(module),
        target=word(config.weight_key),
        activation=word(config.activation_key),
        rule=rule_of(module.decision, request),
        shapes=tuple(dict.fromkeys(step.shape for step in steps)),
        weights=len(steps),
        bytes_before=sum(step.nbytes for step in steps),
        bytes_after=sum(part_nbytes(part) for step in steps for part in step.parts),
        kernel=kernel,
        seconds=spent.seconds,
        sqnr_db=sqnr,
    )


def quant_dtype_name(torch_name: str, bits: int) -> str:
    """Return a dtype as reports call it, `torch.uint8` for packed 4-bit codes."""
    return DTYPE_OF_PACKED if bits == PACKED_BITS else f"torch.{torch_name}"


def reason_of(survey: Survey, module: ModulePlan) -> str:
    """Return why a module keeps its format, in words; an empty text for one that is converted."""
    decision, kind = module.decision, survey.kind(module)
    if decision.changes:
        return ""
    if survey.tied is not None and module is survey.tied.plan:
        return survey.tied.reason
    if not decision.reason and decision.why is Why.GLOBAL and kind not in QUANTIZABLE_KINDS:
        return f"{kind} modules are not quantized"
    return decision.reason or _REASONS[decision.why]


def kept_layers(survey: Survey) -> tuple[KeptLayer, ...]:
    """Return one entry for each Linear layer and expert container that is not converted."""
    changed = {module.name for module in survey.changed}
    request = requested(survey)
    found = []
    for module in survey.shown:
        if module.name in changed or survey.kind(module) not in QUANTIZABLE_KINDS:
            continue
        found.append(
            KeptLayer(
                layer=module.name,
                source=survey.source_word(module),
                rule=rule_of(module.decision, request),
                reason=reason_of(survey, module),
                shapes=survey.shapes_of(module),
                nbytes=stored_nbytes(survey, module),
            )
        )
    return tuple(found)


def other_modules(survey: Survey) -> tuple[OtherModules, ...]:
    """Return how many modules there are of each kind that is never quantized, and their bytes."""
    groups: dict[str, list[int]] = defaultdict(list)
    for module in survey.plan.modules:
        kind = survey.kind(module)
        if kind not in QUANTIZABLE_KINDS:
            groups[kind].append(stored_nbytes(survey, module))
    return tuple(
        OtherModules(kind, len(sizes), sum(sizes), f"{kind} modules are not quantized")
        for kind, sizes in groups.items()
    )


def stored_nbytes(survey: Survey, planned: ModulePlan) -> int:
    """Return the bytes of a module's weights and their scales in the checkpoint; 0 if it has none of its own."""
    if survey.tied is not None and planned is survey.tied.plan:
        return 0
    module = survey.modules[planned.name]
    total = sum(stop - start for *_, start, stop in module.weights)
    if (survey.config.source or survey.config).quant_method is None:
        return total
    tensors = survey.folder.tensors
    stems = [weight.name.removesuffix("_packed") for weight in module.weights]
    scales = [f"{stem}{suffix}" for stem in stems for suffix in SCALE_SUFFIXES]
    return total + sum(tensors[name].nbytes for name in scales if name in tensors)


def unmatched_entries(survey: Survey) -> tuple[UnmatchedEntry, ...]:
    """Return the entries that fit no module, each with the module names that look most like it."""
    return unmatched_of(survey.plan.unmatched, (module.name for module in survey.shown))


def unmatched_of(entries: Sequence[Pattern], names: Iterable[str]) -> tuple[UnmatchedEntry, ...]:
    """Return entries that fit no module as reports list them.

    Args:
        entries: the entries.
        names: names of all modules.
    """
    hints = NameHints(names if entries else ())
    return tuple(UnmatchedEntry(entry.text, entry.path, hints.of(entry.text)) for entry in entries)
