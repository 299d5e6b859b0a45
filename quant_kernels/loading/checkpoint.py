"""quantize_checkpoint: a checkpoint folder in, a quantized checkpoint folder and a report out."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import attrs
import torch

from quant_kernels.library import native_on
from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.job import Job, Step, prepare
from quant_kernels.loading.output import OutputFolder, check_output
from quant_kernels.loading.report_parts import (
    kept_layers,
    other_modules,
    quantized_layers,
    requested,
    unmatched_entries,
)
from quant_kernels.loading.steps import CopyStep
from quant_kernels.loading.storage import QUARK
from quant_kernels.loading.survey import Survey, survey
from quant_kernels.loading.transfer import Converted, SourceFiles, Transfer, write_all
from quant_kernels.loading.workers import Workers, worker_count
from quant_spec import LoadError, QuantSpecError
from quant_spec.report import QuantReport, check_report_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant_kernels.loading.shard_layout import ShardLayout

_log = logging.getLogger("quant_kernels")
VERSIONED: Final = ("quant-spec", "torch", "safetensors")
"""Packages whose versions the report gives."""


class Progress(Protocol):
    """Told of progress, in bytes of the source."""

    def start(self, total: int) -> None:
        """Take the bytes of the whole job."""
        ...

    def advance(self, nbytes: int, name: str) -> None:
        """Take the bytes of a tensor that is done, and its name."""
        ...


class NoProgress:
    """Progress that nobody looks at."""

    def start(self, total: int) -> None:
        """Ignore the size of the job."""

    def advance(self, nbytes: int, name: str) -> None:
        """Ignore a tensor."""


def quantize_checkpoint(  # noqa: PLR0913  (each changes one thing about the job)
    model_dir: Path | str,
    request: object,
    output: Path | str,
    *,
    report_dir: Path | str | None = None,
    scale_rounding: str | None = None,
    export_format: str = QUARK.name,
    shorthand: str | None = None,
    on_unsupported: str = "keep",
    measure: bool = False,
    write_report: bool = True,
    progress: Progress | None = None,
) -> QuantReport:
    """Quantize a checkpoint folder into another one that engines load as an offline quantized checkpoint.

    Tensors are converted one after the other, some rows at a time: memory does not grow with the model. `output`
    appears when it is complete; an interruption leaves `OUTPUT.partial`, which the same call takes up again; a refusal
    leaves nothing.

    Args:
        model_dir: folder with config.json and safetensors files.
        request: an `online_quant_config`, or an object of `targets` or of `linear` and `moe`.
        output: folder to be written; must not exist.
        report_dir: folder of the report's file; None: as `QuantReport.write`.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        export_format: whose checkpoint it becomes, names, shapes and config: `quark` or `compressed-tensors`.
        shorthand: vLLM's word beside the request.
        on_unsupported: `keep` layers that cannot be converted, with a warning, or `error`.
        measure: also measure the error of each layer (`sqnr_db`).
        write_report: False: only return the report.
        progress: told of every tensor.

    Returns:
        The report; its `output` is the folder, its `saved_to` the report's file.

    Raises:
        ConfigError, ResolveError, PlanError: the request is refused.
        LoadError: the checkpoint is damaged or holds NaN or Inf, or the output cannot be written.
    """
    source = Path(model_dir)
    folder = open_folder(source)
    check_output(Path(output), source)
    surveyed = survey(folder, request, shorthand=shorthand, on_unsupported=on_unsupported)
    return carry_out(
        surveyed,
        output,
        report_dir=report_dir,
        scale_rounding=scale_rounding,
        export_format=export_format,
        measure=measure,
        write_report=write_report,
        progress=progress,
    )


def carry_out(
    surveyed: Survey,
    output: Path | str,
    *,
    report_dir: Path | str | None = None,
    scale_rounding: str | None = None,
    export_format: str = QUARK.name,
    measure: bool = False,
    write_report: bool = True,
    progress: Progress | None = None,
) -> QuantReport:
    """Do what was planned: the second half of `quantize_checkpoint`.

    Args:
        surveyed: the plan.
        output: folder to be written; must not exist.
        report_dir: folder of the report's file; None: as `QuantReport.write`.
        scale_rounding: of formats with power-of-two scales; None: each format's default.
        export_format: `quark` or `compressed-tensors`.
        measure: also measure the error of each layer.
        write_report: False: only return the report.
        progress: told of every tensor.

    Raises:
        PlanError, LoadError: as `quantize_checkpoint`.
    """
    started = time.perf_counter()
    target = Path(output)
    if write_report:
        check_report_folder(report_dir)
    job = prepare(surveyed, scale_rounding=scale_rounding, export_format=export_format)
    written = OutputFolder(target, job)
    warnings = [*surveyed.warnings, *job.warnings]
    if written.done:
        warnings.append(f"{written.partial}: {len(written.done)} of {len(job.layouts)} files were complete already")
    try:
        spent = _run(job, written, progress or NoProgress(), measure=measure)
        written.write_documents()
        written.complete()
    except QuantSpecError:
        written.discard()
        raise
    except OSError as error:
        written.discard()
        message = f"{target}: cannot be written: {error.strerror or error}"
        raise LoadError(message) from error
    report = QuantReport(
        model=str(surveyed.folder.path),
        online_quant_config=requested(surveyed),
        elapsed_seconds=time.perf_counter() - started,
        layers=quantized_layers(job, spent, kernel="native" if native_on("cpu") else "reference"),
        kept=kept_layers(surveyed),
        unmatched=unmatched_entries(surveyed),
        warnings=tuple(warnings),
        bytes_before=surveyed.folder.nbytes,
        bytes_after=job.tensor_nbytes,
        versions=_versions(),
        digest=surveyed.config.digest(),
        output=str(target),
        others=other_modules(surveyed),
    )
    if write_report:
        report = attrs.evolve(report, saved_to=report.write(report_dir))
    for line in report.log_lines():
        _log.info("%s", line)
    return report


def _run(job: Job, written: OutputFolder, progress: Progress, *, measure: bool) -> dict[str, Converted]:
    """Write every shard that is not complete; return what each layer took."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    progress.start(job.survey.folder.nbytes)
    through = getattr(torch, job.survey.config.source_dtype)
    with SourceFiles(job.survey.folder.path) as source:

        def transfer() -> Transfer:
            return Transfer(source, scale_rounding=job.scale_rounding, through=through, measure=measure)

        with Workers(worker_count(job), transfer) as workers:
            for layout in job.layouts:
                if layout.file in written.done:
                    for step in job.steps[layout.file]:
                        progress.advance(step.nbytes, layout.file)
                else:
                    _write_shard(job.steps[layout.file], layout, written, workers, progress)
                source.close_except(frozenset())
                for layer, sums in written.done[layout.file].items():
                    spent[layer] = [before + more for before, more in zip(spent[layer], sums, strict=True)]
    return {layer: Converted(*sums) for layer, sums in spent.items()}


def _write_shard(
    steps: Sequence[Step], layout: ShardLayout, written: OutputFolder, workers: Workers, progress: Progress
) -> None:
    """Write one file and note layer -> seconds, Σ w², Σ (w − ŵ)²."""
    layers: dict[str, list[float]] = {}
    path, descriptor = written.begin_shard(layout.file)
    try:
        os.truncate(descriptor, layout.nbytes)
        write_all(descriptor, memoryview(layout.header), 0)
        # Closed before the file is: no thread writes to it any more, whatever happens here.
        with closing(workers.run(steps, descriptor, layout.offsets)) as finished:
            for step, done in finished:
                name = step.name if isinstance(step, CopyStep) else step.weight.name
                if not isinstance(step, CopyStep) and done is not None:
                    sums = layers.get(step.layer, [0.0, 0.0, 0.0])
                    layers[step.layer] = [sums[0] + done.seconds, sums[1] + done.signal, sums[2] + done.noise]
                progress.advance(step.nbytes, name)
    finally:
        os.close(descriptor)
    written.finish_shard(layout.file, path, layers)


def _versions() -> dict[str, str]:
    return {package: found for package in VERSIONED if (found := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
