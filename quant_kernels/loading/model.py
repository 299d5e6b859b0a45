"""quantize_model: a model that holds its weights is quantized in place, layer by layer."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import attrs
import torch

from quant_kernels.loading.decisions import LayerPlan, ModelDecisions, Policy, decide
from quant_kernels.loading.distributed import DEFAULT_TIMEOUT, OneRank, Ranks, as_ranks, together
from quant_kernels.loading.install import tensor_nbytes
from quant_kernels.loading.layer import LayerConverter, SlotWork
from quant_kernels.loading.model_report import (
    RankPart,
    kept_nbytes,
    merged_report,
    peak_bytes,
    source_words,
    write_and_log,
)
from quant_kernels.loading.modules import VIEWS, LayerView, ModuleView, find_layers
from quant_kernels.loading.order import in_name_order
from quant_kernels.loading.parallel import ShardPlace
from quant_kernels.loading.placement import place_layers
from quant_kernels.loading.sources import read_slot, stored_scales
from quant_kernels.loading.weights import ConversionOptions, WeightWork
from quant_spec import LoadError, QuantizationConfig
from quant_spec.report import check_report_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from quant_spec import ModelPlan
    from quant_spec.report import QuantReport

META: Final = torch.device("meta")


def quantize_model(  # noqa: PLR0913  (each changes one thing about the job)
    model: nn.Module,
    config: QuantizationConfig | object,
    *,
    scale_rounding: str | None = None,
    on_unsupported: str = "keep",
    on_unmatched: str = "warn",
    requantize_sources: Sequence[str] = (),
    check: bool = True,
    measure: bool = False,
    fnuz: bool = False,
    layout: str = "row_major",
    group: Ranks | dist.ProcessGroup | DeviceMesh | None = None,
    parallel: Mapping[str, str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    views: Sequence[ModuleView] = VIEWS,
    name: str | None = None,
    report_dir: Path | str | None = None,
    write_report: bool = True,
) -> QuantReport:
    """Quantize a model in place.

    Linear layers and fused experts are converted one after the other; what is not asked for, excluded, or already in
    its format keeps its bytes. A weight `X` becomes codes, `X_scale` (NVFP4: `X_scale_2` too) is registered beside it,
    and the module gets `quant_type` and `quant_config`. The replaced weight is freed unless the caller holds it.

    Args:
        model: holds its weights, on any device; several ranks: this rank's piece of them.
        config: a request over a checkpoint's config (`QuantizationConfig.from_online`), or a request document, whose
            checkpoint is then unquantized.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        on_unsupported: `keep` layers that cannot be converted, with a warning, or `error`, before any is touched.
        on_unmatched: `warn` of entries that fit no layer, or `error`, before any is touched.
        requantize_sources: `mxfp4`, `nvfp4`: formats that are kept unless named here.
        check: raise on NaN and Inf; the layer is then untouched.
        measure: also measure the error of each layer (`sqnr_db`).
        fnuz: store float8_e4m3fnuz where PTPC is asked for (gfx942).
        layout: `row_major`, or `cdna`: the tile order of AMD's matrix kernels.
        group: process group or one-dimensional mesh that the weights are cut over; None: this process alone.
        parallel: glob over layer names -> `column`, `row`, `tensor` (experts: gate and up by column, down by row),
            `expert` or `replicated`; else what modules say (`quant_parallel`, or their class).
        timeout: seconds to wait for other ranks.
        views: what tells weights from other parameters.
        name: what the report calls the model; None: its config's `_name_or_path`, or its class.
        report_dir: folder of the report's file; None: as `QuantReport.write`.
        write_report: False: only return the report.

    Returns:
        The report, over all ranks.

    Raises:
        ConfigError, ResolveError, PlanError: the request is refused; nothing was touched.
        NonFiniteError: checked, and a weight holds NaN or Inf; its layer and those after it are untouched.
        LoadError: a weight cannot be read or converted, or ranks disagree or do not answer; likewise.
    """
    begun = time.perf_counter()
    request = config if isinstance(config, QuantizationConfig) else QuantizationConfig.from_online(config)
    ranks = as_ranks(group, timeout=timeout)
    if write_report and ranks.rank == 0:
        check_report_folder(report_dir)
    policy = Policy(on_unsupported, tuple(requantize_sources), scale_rounding, fnuz, on_unmatched)
    through = getattr(torch, request.source_dtype)
    options = ConversionOptions(scale_rounding, check, measure, fnuz, layout, through)
    decisions = survey_model(model, request, ranks, policy, options, parallel, views)
    work: dict[str, list[SlotWork]] = {}
    together(ranks, "reading the weights", lambda: _read_all(decisions, work))
    before, sources, kept = tensor_nbytes(model), source_words(decisions), kept_nbytes(decisions)
    converter = LayerConverter(ranks, options, len(decisions.changed), tied_keys(decisions))
    device = decisions.changed[0].view.slots[0].tensor.device
    elapsed = _convert_all(decisions, ranks, converter, work)
    part = RankPart(
        records=tuple(converter.records),
        kept=kept,
        sources=sources,
        elapsed_seconds=elapsed,
        load_seconds=time.perf_counter() - begun,
        bytes_before=before,
        bytes_after=tensor_nbytes(model),
        peak_bytes=peak_bytes(device),
        sent_bytes=ranks.sent_bytes,
    )
    report = merged_report(ranks, decisions, part, model=name or model_name(model))
    return write_and_log(ranks, report, report_dir, write=write_report)


def plan_model(
    model: nn.Module,
    config: QuantizationConfig | object,
    *,
    on_unsupported: str = "keep",
    on_unmatched: str = "warn",
    requantize_sources: Sequence[str] = (),
    views: Sequence[ModuleView] = VIEWS,
) -> ModelPlan:
    """Return what `quantize_model` would make of a model; its parameters may be on meta.

    Args:
        model: the model.
        config: as for `quantize_model`.
        on_unsupported: as for `quantize_model`.
        on_unmatched: as for `quantize_model`.
        requantize_sources: as for `quantize_model`.
        views: as for `quantize_model`.

    Raises:
        ConfigError, ResolveError, PlanError: the request is refused.
    """
    request = config if isinstance(config, QuantizationConfig) else QuantizationConfig.from_online(config)
    policy = Policy(on_unsupported, tuple(requantize_sources), on_unmatched=on_unmatched)
    return survey_model(model, request, OneRank(), policy, ConversionOptions(), None, views).plan


def survey_model(
    model: nn.Module,
    config: QuantizationConfig,
    ranks: Ranks,
    policy: Policy,
    options: ConversionOptions,
    parallel: Mapping[str, str] | None,
    views: Sequence[ModuleView],
) -> ModelDecisions:
    """Return what becomes of each layer; nothing is touched, and all ranks have agreed.

    Raises:
        ResolveError, PlanError: the request is refused.
        LoadError: ranks disagree, or one does not answer.
    """
    layers = find_layers(model, config.names, views)
    return settle_layers(layers, config, ranks, policy, options, parallel, ties_of(model, layers))


def settle_layers(
    layers: Mapping[str, LayerView],
    config: QuantizationConfig,
    ranks: Ranks,
    policy: Policy,
    options: ConversionOptions,
    parallel: Mapping[str, str] | None,
    ties: Mapping[str, Collection[str]],
) -> ModelDecisions:
    """Return what becomes of each of the layers, on which all ranks agree; nothing is touched.

    Raises:
        ResolveError, PlanError: the request is refused.
        LoadError: ranks disagree, or one does not answer.
    """
    agreed_on = f"config {config.digest()}, {policy}, {options}"
    placements = place_layers(layers, ranks, parallel, agreed_on=agreed_on)
    made: list[ModelDecisions] = []

    def settle() -> list[tuple[str, str]]:
        found = decide(layers, with_experts(config, layers), placements, ties, policy)
        made.append(attrs.evolve(found, config=config))
        return sorted((layer.name, str(layer.decision.config.weight)) for layer in found.changed)

    answers = together(ranks, "deciding about the layers", settle)
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            name, word = next(iter(set(answer) ^ set(answers[0])))
            message = f"rank {rank} decides otherwise than rank 0: {name} becomes {word} on one of them alone"
            raise LoadError(message)
    return made[0]


def with_experts(config: QuantizationConfig, layers: Mapping[str, LayerView]) -> QuantizationConfig:
    """Return a config that knows the leaves of containers that hold one Linear an expert, if nothing told it."""
    if config.names.num_experts is not None or config.names.tensors is not None:
        return config
    leaves: dict[str, None] = {}
    experts = -1
    for layer in layers.values():
        for slot in layer.slots if layer.kind == "moe" else ():
            index, _, leaf = slot.owner_name.removeprefix(layer.name).lstrip(".").partition(".")
            if index.isdigit() and leaf:
                leaves[leaf] = None
                experts = max(experts, int(index))
    if experts < 0:
        return config
    return config.with_names(config.names.with_modules(num_experts=experts + 1, expert_leaves=tuple(leaves)))


def ties_of(model: nn.Module, layers: Mapping[str, LayerView]) -> dict[str, set[str]]:
    """Return layer -> the other layers, or parameters of no layer, that hold one of its weights too."""
    holders: dict[int, set[str]] = defaultdict(set)
    owned: set[tuple[int, str]] = set()
    for layer in layers.values():
        for slot in layer.slots:
            holders[id(slot.tensor)].add(layer.name)
            owned.add((id(slot.owner), slot.attribute))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():  # noqa: SLF001  (named_parameters builds every name)
            if parameter is not None and id(parameter) in holders and (id(module), attribute) not in owned:
                holders[id(parameter)].add(f"{prefix}.{attribute}")
    found: dict[str, set[str]] = defaultdict(set)
    for names in holders.values():
        for each in names & layers.keys() if len(names) > 1 else ():
            found[each] |= names - {each}
    return found


def tied_keys(decisions: ModelDecisions) -> Collection[int]:
    """Return the keys of weights that several slots hold."""
    seen: set[int] = set()
    twice: set[int] = set()
    for layer in decisions.changed:
        for slot in layer.view.slots:
            key = id(slot.tensor)
            (twice if key in seen else seen).add(key)
    return frozenset(twice)


def model_name(model: nn.Module) -> str:
    """Return what a report calls a model: its config's `_name_or_path`, else its class."""
    said = getattr(getattr(model, "config", None), "_name_or_path", "")
    return said if isinstance(said, str) and said else type(model).__name__


def work_of(layer: LayerPlan) -> list[SlotWork]:
    """Return the weights that a layer's modules hold, ready to be converted.

    Raises:
        LoadError: one cannot be read.
    """
    places = layer.placement.places if layer.placement else (ShardPlace(),) * len(layer.view.slots)
    found = []
    for slot, place in zip(layer.view.slots, places, strict=True):
        parts = read_slot(slot, layer.decision.source.weight_key)
        old = stored_scales(slot)
        nbytes = slot.tensor.nbytes + old.nbytes
        found.append(SlotWork(slot, WeightWork(slot.name, slot.shape, parts), place, old, nbytes, id(slot.tensor)))
    return found


def _read_all(decisions: ModelDecisions, work: dict[str, list[SlotWork]]) -> None:
    for layer in decisions.changed:
        for slot in layer.view.slots:
            if slot.tensor.device == META:
                message = f"{slot.name}: on meta, without values; load it first, or use OnlineQuantizer"
                raise LoadError(message)
        work[layer.name] = work_of(layer)


def _convert_all(
    decisions: ModelDecisions, ranks: Ranks, converter: LayerConverter, work: dict[str, list[SlotWork]]
) -> float:
    """Convert every layer; return the seconds that it took.

    Several ranks come to the layers in the order of their names, whatever the order of their modules. A rank that fails
    takes part in the next exchange of that schedule, where all ranks learn of it and raise.
    """
    layers = decisions.changed if ranks.size == 1 else tuple(in_name_order(decisions.changed))
    started = time.perf_counter()
    for index, layer in enumerate(layers):
        works = work.pop(layer.name)
        try:
            converter.convert(layer, works)
        except Exception:
            after = layers[index + 1 :]
            converter.tell_others(after, [work[each.name] for each in after])
            raise
        del works
    device = decisions.changed[-1].view.slots[0].tensor.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
