"""The report of a model quantized in memory: one rank's part of it, and the parts of all ranks as one."""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, cast

import attrs
import torch

from quant_kernels.checks import dtype_name
from quant_kernels.loading.distributed import Ranks, raise_failures
from quant_kernels.loading.layer import LayerRecord
from quant_kernels.loading.report_parts import quant_dtype_name, rule_of, unmatched_of
from quant_kernels.loading.sources import is_plain, stored_scales
from quant_spec.layer_config import word
from quant_spec.matching import Why
from quant_spec.report import KeptLayer, LayerReport, LoadingFacts, QuantReport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from quant_kernels.loading.decisions import LayerPlan, ModelDecisions
    from quant_spec import Decision, LayerQuantConfig, QuantKey
    from quant_spec.report import Rule

_log = logging.getLogger("quant_kernels")
_REASONS: Final = {
    Why.EXCLUDE: "excluded",
    Why.PATTERN: "the entry leaves it as it is",
    Why.GLOBAL: "no entry names it, and there is no global format",
    Why.ALREADY: "already in the format asked for",
}
_ELEMENTS: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_VERSIONED: Final = ("quant-spec", "torch")


@attrs.frozen
class RankPart:
    """What one rank did.

    Attributes:
        records: one a converted layer.
        kept: layer -> bytes of its weights and scales, for layers that stay as they are.
        sources: layer -> its format before, in the words of reports.
        elapsed_seconds: time of the conversions alone.
        load_seconds: time from the first weight to the last conversion.
        bytes_before: bytes of all tensors of the model before.
        bytes_after: the same, after.
        bytes_read: bytes of tensors that were loaded; 0 for a model that held its weights.
        peak_bytes: greatest memory in use: on the device if it is one, else resident.
        sent_bytes: bytes put into collectives.
    """

    records: tuple[LayerRecord, ...]
    kept: Mapping[str, int]
    sources: Mapping[str, str]
    elapsed_seconds: float
    load_seconds: float
    bytes_before: int
    bytes_after: int
    bytes_read: int = 0
    peak_bytes: int = 0
    sent_bytes: int = 0


class _Words:
    """What reports call formats and rules: found once for all layers that share them."""

    def __init__(self, request: object) -> None:
        self.request = request
        self._rules: dict[tuple[int, Why], tuple[Rule, object]] = {}
        self._formats: dict[tuple[QuantKey | None, QuantKey | None], tuple[str, str, str, str]] = {}

    def rule(self, decision: Decision) -> Rule:
        """Return the rule that decided about a layer."""
        key = id(decision.entry), decision.why
        if key not in self._rules:
            self._rules[key] = rule_of(decision, self.request), decision.entry
        return self._rules[key][0]

    def of(self, config: LayerQuantConfig) -> tuple[str, str, str, str]:
        """Return quantization type, dtype, weight format and activation format of a layer."""
        key = config.weight_key, config.activation_key
        if key not in self._formats:
            dtype = quant_dtype_name(config.element.torch_name, config.element.bits)
            self._formats[key] = config.quant_type, dtype, word(key[0]), word(key[1])
        return self._formats[key]


def source_words(decisions: ModelDecisions) -> dict[str, str]:
    """Return the format of each layer that has weights, before anything is converted."""
    found = {}
    for layer in decisions.layers:
        if not layer.view.slots:
            continue
        key = layer.decision.source.weight_key
        tensor = layer.view.slots[0].tensor
        name = dtype_name(tensor.dtype)
        found[layer.name] = str(key) if key is not None and not is_plain(tensor) else _ELEMENTS.get(name, name)
    return found


def kept_nbytes(decisions: ModelDecisions) -> dict[str, int]:
    """Return the bytes of each layer that stays as it is."""
    return {
        layer.name: sum(slot.tensor.nbytes + stored_scales(slot).nbytes for slot in layer.view.slots)
        for layer in decisions.layers
        if layer.target is None and layer.view.slots
    }


def peak_bytes(device: torch.device) -> int:
    """Return the greatest memory that was in use: allocated on a CUDA device, else resident in the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def merged_report(
    ranks: Ranks, decisions: ModelDecisions, part: RankPart, *, model: str, failure: str | None = None
) -> QuantReport:
    """Return the report over all ranks; every rank gets the same.

    Raises:
        LoadError: a rank failed, or does not answer.
    """
    answers = cast("list[tuple[RankPart, str | None]]", ranks.gather((part, failure), "gathering the report"))
    raise_failures(ranks, "quantizing the model", [each[1] for each in answers])
    parts = [each[0] for each in answers]
    words = _Words(_request(decisions))
    at = {name: index for index, name in enumerate(parts[0].sources)}
    weighty = (layer for layer in decisions.layers if layer.view.slots)
    ordered = sorted(weighty, key=lambda layer: at.get(layer.name, len(at)))
    by_rank = [{record.layer: record for record in each.records} for each in parts]
    layers = [
        _layer(layer, [each.get(layer.name) for each in by_rank], parts, words)
        for layer in ordered
        if layer.target is not None
    ]
    return QuantReport(
        model=model,
        online_quant_config=words.request,
        elapsed_seconds=max(each.elapsed_seconds for each in parts),
        layers=tuple(layers),
        kept=tuple(_kept(layer, parts, words) for layer in ordered if layer.target is None),
        unmatched=unmatched_of(decisions.plan.unmatched, (layer.name for layer in decisions.layers)),
        warnings=decisions.plan.warnings,
        bytes_before=sum(each.bytes_before for each in parts),
        bytes_after=sum(each.bytes_after for each in parts),
        versions=_versions(),
        digest=decisions.config.digest(),
        loading=LoadingFacts(
            ranks=ranks.size,
            load_seconds=max(each.load_seconds for each in parts),
            bytes_read=sum(each.bytes_read for each in parts),
            peak_bytes=max(each.peak_bytes for each in parts),
            sent_bytes=sum(each.sent_bytes for each in parts),
        ),
    )


def write_and_log(ranks: Ranks, report: QuantReport, folder: Path | str | None, *, write: bool) -> QuantReport:
    """Write the report's file and the log lines on rank 0; return the report with the file's path on all ranks.

    Raises:
        LoadError: rank 0 could not write it.
    """
    path: Path | None = None
    failure: str | None = None
    if ranks.rank == 0 and write:
        try:
            path = report.write(folder)
        except Exception as error:
            failure = str(error)
            if ranks.size == 1:
                raise
    if write and ranks.size > 1:
        said = cast("list[tuple[Path | None, str | None]]", ranks.gather((path, failure), "writing the report"))
        raise_failures(ranks, "writing the report", [each[1] for each in said])
        path = said[0][0]
    report = attrs.evolve(report, saved_to=path)
    if ranks.rank == 0:
        for line in report.log_lines():
            _log.info("%s", line)
        for line in report.warnings:
            _log.warning("%s", line)
    return report


def _layer(
    layer: LayerPlan, records: Sequence[LayerRecord | None], parts: Sequence[RankPart], words: _Words
) -> LayerReport:
    placement = layer.placement
    quant_type, quant_dtype, target, activation = words.of(layer.decision.config)
    present = [record for record in records if record is not None]
    spread = placement is not None and placement.is_spread
    counted = present if spread else present[:1]
    signal, noise = sum(each.signal for each in counted), sum(each.noise for each in counted)
    by_expert = placement is not None and placement.style == "expert"
    source = next(each.sources[layer.name] for each in parts if layer.name in each.sources)
    return LayerReport(
        layer=layer.name,
        quant_type=quant_type,
        quant_dtype=quant_dtype,
        source=source,
        target=target,
        activation=activation,
        rule=words.rule(layer.decision),
        shapes=_shapes(layer),
        weights=sum(each.weights for each in present) if by_expert else layer.view.weights,
        bytes_before=sum(each.bytes_before for each in counted),
        bytes_after=sum(each.bytes_after for each in counted),
        kernel=present[0].kernel,
        seconds=max(each.seconds for each in present),
        sqnr_db=10 * math.log10(signal / noise) if signal and noise else None,
        experts=_ranges(placement.experts) if by_expert and placement is not None else None,
    )


def _shapes(layer: LayerPlan) -> tuple[tuple[int, ...], ...]:
    shapes = layer.placement.whole_shapes if layer.placement else layer.view.shapes
    return tuple(dict.fromkeys(shapes))


def _kept(layer: LayerPlan, parts: Sequence[RankPart], words: _Words) -> KeptLayer:
    spread = layer.placement is not None and layer.placement.is_spread
    counted = parts if spread else parts[:1]
    return KeptLayer(
        layer=layer.name,
        source=next(each.sources[layer.name] for each in parts if layer.name in each.sources),
        rule=words.rule(layer.decision),
        reason=layer.decision.reason or _REASONS[layer.decision.why],
        shapes=_shapes(layer),
        nbytes=sum(each.kept.get(layer.name, 0) for each in counted),
    )


def _ranges(indices: Sequence[int]) -> str:
    """Return sorted indices as ranges.

    >>> _ranges((0, 1, 2, 5, 7, 8))
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def _request(decisions: ModelDecisions) -> object:
    document = decisions.config.to_dict()
    return document.get("request") if document else None


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # noqa: PERF203  (two packages)
            continue
    return found
