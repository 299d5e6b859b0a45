"""quantize_checkpoint: a checkpoint folder in, a quantized checkpoint folder and a report out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.library import native_on
from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.job import Job, prepare
from quant_kernels.loading.output import OutputFolder, check_output_or_finished, fingerprint
from quant_kernels.loading.ranks import COLLECTED, COMPLETE, WRITTEN, Meeting, PeerError, Ranks
from quant_kernels.loading.report_parts import kept_layers, quantized_layers, requested, unmatched_entries
from quant_kernels.loading.shards import NoProgress, Progress, ShardWriter, Verified
from quant_kernels.loading.sinks import DifferenceError
from quant_kernels.loading.storage import QUARK
from quant_kernels.loading.survey import Survey, survey
from quant_kernels.loading.transfer import Converted
from quant_spec import LoadError, QuantSpecError
from quant_spec.report import QuantReport, check_report_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from quant_kernels.loading.output import Sums

_log = logging.getLogger("quant_kernels")
VERSIONED: Final = ("quant-spec", "torch", "safetensors")
"""Packages whose versions the report gives."""


@attrs.frozen(kw_only=True)
class JobOptions:
    """How a plan is carried out.

    Attributes:
        report_dir: folder of the report's file; None: as `QuantReport.write`.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        export_format: whose checkpoint it becomes, names, shapes and config: `quark` or `compressed-tensors`.
        measure: also measure the error of each layer (`sqnr_db`).
        verify: read all that was written again, and compare it with what the source gives, before it gets its name.
        clean: remove what an interrupted run left, and start anew.
        ranks: this process among several that write the same output on a file system they share; None: alone.
        write_report: False: only return the report.
        on_verified: called with the counts of what this process has verified.
    """

    report_dir: Path | str | None = None
    scale_rounding: str | None = None
    export_format: str = QUARK.name
    measure: bool = False
    verify: bool = False
    clean: bool = False
    ranks: Ranks | None = None
    write_report: bool = True
    on_verified: Callable[[Verified], object] | None = None


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
    on_unmatched: str = "warn",
    measure: bool = False,
    verify: bool = False,
    clean: bool = False,
    ranks: Ranks | None = None,
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
        on_unmatched: `warn` of entries that fit no module, or `error`.
        measure: also measure the error of each layer (`sqnr_db`).
        verify: read all that was written again, and compare it with what the source gives, before it gets its name.
        clean: remove what an interrupted run left, and start anew.
        ranks: this process among several that write the same output; rank 0 finishes it and writes the report.
        write_report: False: only return the report.
        progress: told of every tensor.

    Returns:
        The report; its `output` is the folder, its `saved_to` the report's file.

    Raises:
        ConfigError, ResolveError, PlanError: the request is refused.
        LoadError: the checkpoint is damaged, changes or holds NaN or Inf; the output cannot be written, is being
            written by another process, or does not hold what was written; another rank has failed.
    """
    source = Path(model_dir)
    folder = open_folder(source)
    check_output_or_finished(Path(output), source)
    surveyed = survey(folder, request, shorthand=shorthand, on_unsupported=on_unsupported, on_unmatched=on_unmatched)
    options = JobOptions(
        report_dir=report_dir,
        scale_rounding=scale_rounding,
        export_format=export_format,
        measure=measure,
        verify=verify,
        clean=clean,
        ranks=ranks,
        write_report=write_report,
    )
    return carry_out(surveyed, output, options, progress=progress)


def carry_out(
    surveyed: Survey, output: Path | str, options: JobOptions | None = None, *, progress: Progress | None = None
) -> QuantReport:
    """Do what was planned: the second half of `quantize_checkpoint`.

    Args:
        surveyed: the plan.
        output: folder to be written; must not exist.
        options: how; None: as the defaults say.
        progress: told of every tensor.

    Raises:
        PlanError, LoadError: as `quantize_checkpoint`.
    """
    started = time.perf_counter()
    options = options or JobOptions()
    ranks = options.ranks or Ranks()
    target = Path(output)
    if options.write_report and ranks.leads:
        check_report_folder(options.report_dir)
    job = prepare(surveyed, scale_rounding=options.scale_rounding, export_format=options.export_format)
    with _joined(target, job, options, ranks) as (written, meeting):
        warnings = [*surveyed.warnings, *job.warnings]
        if written.done:
            warnings.append(f"{written.partial}: {len(written.done)} of {len(job.layouts)} files were complete already")
        if not written.is_complete:
            _write(job, written, meeting, options, progress or NoProgress())
        spent = _spent(written.done)
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
        )
        if options.write_report and ranks.leads:
            report = attrs.evolve(report, saved_to=report.write(options.report_dir))
    if ranks.leads:
        for line in report.log_lines():
            _log.info("%s", line)
    return report


@contextmanager
def _joined(target: Path, job: Job, options: JobOptions, ranks: Ranks) -> Iterator[tuple[OutputFolder, Meeting | None]]:
    """Take the partial folder, with the other processes if there are any; leave it as what happens asks for.

    What was written stays after an interruption, and after a failure of the machine if there is a complete shard; it
    goes after a refusal.
    """
    meeting = None
    if ranks.leads:
        written = OutputFolder(target, job, clean=options.clean)
        if ranks.world > 1 and not written.is_complete:
            meeting = Meeting(ranks, written.partial, written.fingerprint)
    else:
        meeting = Meeting(ranks, target.with_name(f"{target.name}.partial"), fingerprint(job))
        meeting.enter()
        written = OutputFolder(target, job, leader=False)
    try:
        if meeting is not None and ranks.leads:
            meeting.enter()
        yield written, meeting
    except BaseException as error:
        told = _told(error, target, job, written)
        _give_up(error, told, written, meeting, leads=ranks.leads)
        if told is not error:
            raise told from error
        raise
    if ranks.leads:
        written.close()
    if meeting is not None:
        meeting.leave()


def _told(error: BaseException, target: Path, job: Job, written: OutputFolder) -> BaseException:
    """Return the error that the caller gets: of a file that cannot be written, one that says where and what stays."""
    if not isinstance(error, OSError):
        return error
    state = f"; {len(written.done)} of {len(job.layouts)} files are complete in {written.partial}"
    more = f"{state}: the same command takes it up" if written.done else ""
    return LoadError(f"{target}: cannot be written: {error.strerror or error}{more}")


def _give_up(
    error: BaseException, told: BaseException, written: OutputFolder, meeting: Meeting | None, *, leads: bool
) -> None:
    """Tell the other processes, and leave the partial folder for the next run, or not at all."""
    refused = _is_refusal(error)
    if meeting is not None:
        meeting.fail(told, keep=not refused)
    if leads:
        if written.is_complete:
            written.close()
        elif not refused and (written.done or not isinstance(error, Exception)):
            written.release()
        else:
            if meeting is not None:
                meeting.wait_for_silence()
            written.discard()
    if meeting is not None:
        meeting.leave()


def _is_refusal(error: BaseException) -> bool:
    """Tell whether an error is about what was asked for or read, which the next run would meet again."""
    if isinstance(error, PeerError):
        return not error.keep
    if isinstance(error, DifferenceError):
        return False
    return isinstance(error, QuantSpecError) and not isinstance(error.__cause__, OSError)


def _write(job: Job, written: OutputFolder, meeting: Meeting | None, options: JobOptions, progress: Progress) -> None:
    """Write the shards of this process, verify them if asked, and finish the folder with the others."""
    ranks = options.ranks or Ranks()
    look = _nothing if meeting is None else meeting.look
    writer = ShardWriter(job, written, ranks.share(job.layouts), progress, look)
    progress.start(writer.source_nbytes() * (2 if options.verify else 1))
    writer.write(measure=options.measure)
    if options.verify:
        verified = writer.verify()
        _log.info("%s", verified)
        if options.on_verified is not None:
            options.on_verified(verified)
    if meeting is not None:
        meeting.reach(WRITTEN)
        written.take_up()
        if not ranks.leads:
            # The leader may finish, and remove the folder, as soon as all have read what is in it.
            meeting.say(COLLECTED)
            meeting.wait_for(COMPLETE, [0], gone_is_done=True)
            return
        meeting.reach(COLLECTED)
    written.write_documents()
    written.complete()
    if meeting is not None:
        meeting.say(COMPLETE)


def _nothing() -> None:
    """Do nothing."""


def _spent(done: Mapping[str, Sums]) -> dict[str, Converted]:
    """Return what each layer took, over all shards."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for layers in done.values():
        for layer, sums in layers.items():
            spent[layer] = [before + more for before, more in zip(spent[layer], sums, strict=True)]
    return {layer: Converted(*sums) for layer, sums in spent.items()}


def _versions() -> dict[str, str]:
    return {package: found for package in VERSIONED if (found := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
