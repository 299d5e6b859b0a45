"""`quant-spec quantize`: a checkpoint folder in, a quantized one and a report out."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from quant_kernels.commands.console import (
    ExitCode,
    imports,
    print_json,
    print_log,
    print_rich,
    printable,
    read_request,
)
from quant_kernels.commands.progress import ShownProgress
from quant_spec.report import QuantReport, ReportError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quant_kernels.loading.shards import Verified


def run(
    model_dir: Path,
    request: str,
    output: Path,
    *,
    report_dir: Path | None,
    html: bool,
    scale_rounding: str | None,
    export_format: str,
    quantization: str | None,
    on_unsupported: str,
    on_unmatched: str,
    measure: bool,
    verify: bool,
    clean: bool,
    ranks: str | None,
    rank_timeout: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Do the job, showing progress on standard error, the table and the log lines on standard output."""
    document = read_request(request, "--online-quant-config")
    # Cheap refusals before torch is imported, which takes a second.
    from quant_kernels.loading.folder import open_folder
    from quant_kernels.loading.output import check_output_or_finished
    from quant_kernels.loading.ranks import Ranks
    from quant_kernels.loading.survey import survey

    place = Ranks.from_environment(timeout=rank_timeout) if ranks is None else Ranks.parse(ranks, timeout=rank_timeout)
    check_output_or_finished(output, model_dir)
    surveyed = survey(
        open_folder(model_dir),
        document,
        shorthand=quantization,
        on_unsupported=on_unsupported,
        on_unmatched=on_unmatched,
    )
    with imports():
        from quant_kernels.loading.checkpoint import JobOptions, carry_out

    verified: list[Verified] = []
    options = JobOptions(
        report_dir=report_dir,
        scale_rounding=scale_rounding,
        export_format=export_format,
        measure=measure,
        verify=verify,
        clean=clean,
        ranks=place,
        on_verified=verified.append,
    )
    with _terminated(), ShownProgress(quiet=quiet or as_json or not place.leads) as progress:
        try:
            report, failure = _with_page(
                carry_out(surveyed, output, options, progress=progress),
                html=html and place.leads,
            )
        except ReportError as error:
            report, failure = error.report, error
        except KeyboardInterrupt as error:
            partial = output.with_name(f"{output.name}.partial")
            said = f"the same command takes up {partial}" if partial.exists() else "nothing is left of it"
            stopped = isinstance(error, _Terminated)
            sys.stderr.write(f"{'terminated' if stopped else 'interrupted'}; {said}\n")
            raise typer.Exit(ExitCode.TERMINATED if stopped else ExitCode.INTERRUPTED) from None
    if not place.leads:
        if not quiet:
            sys.stderr.write(f"rank {place.rank} of {place.world}: its shards are written\n")
        return
    _print(report, verified, as_json=as_json, quiet=quiet, html=html and failure is None)
    if failure is not None:
        sys.stderr.write(f"error: {printable(str(failure))}\n")
        raise typer.Exit(ExitCode.UNSAID)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: ends the job as SIGINT does."""


@contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM end the job in order, unless the caller has made other arrangements."""

    def end(*_: object) -> None:
        # Once is enough: while the job ends, another signal would tear what it is tidying up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_page(report: QuantReport, *, html: bool) -> tuple[QuantReport, ReportError | None]:
    """Write the page beside the report's file, if it is asked for."""
    if html and report.saved_to is not None:
        try:
            report.write_page(report.saved_to.with_suffix(".html"))
        except ReportError as error:
            return report, error
    return report, None


def _print(report: QuantReport, verified: list[Verified], *, as_json: bool, quiet: bool, html: bool) -> None:
    if as_json:
        saved = None if report.saved_to is None else str(report.saved_to)
        counts = {"verified": verified[0].to_dict()} if verified else {}
        print_json({**report.to_dict(), "report": saved, **counts})
    elif not quiet:
        print_rich(report)
        for line in report.log_lines():
            print_log(line)
        if html and report.saved_to is not None:
            print_log(f"Its page saved to {report.saved_to.with_suffix('.html')}")
        for found in verified:
            print_log(str(found))
        print_log(f"Checkpoint written to {report.output}")
    if quiet or as_json:
        for warning in report.warnings:
            sys.stderr.write(f"warning: {printable(warning)}\n")
