"""`quant-spec quantize`: a checkpoint folder in, a quantized one and a report out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from quant_kernels.commands.console import (
    ExitCode,
    console,
    imports,
    print_json,
    print_line,
    print_rich,
    printable,
    read_request,
)

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

_TENTHS: Final = 10
_NAME_WIDTH: Final = 40


def run(
    model_dir: Path,
    request: str,
    output: Path,
    *,
    report_dir: Path | None,
    scale_rounding: str | None,
    quantization: str | None,
    on_unsupported: str,
    measure: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Do the job, showing progress on standard error, the table and the log lines on standard output."""
    document = read_request(request, "--online-quant-config")
    # Cheap refusals before torch is imported, which takes a second.
    from quant_kernels.loading.folder import open_folder
    from quant_kernels.loading.output import check_output
    from quant_kernels.loading.survey import survey

    check_output(output, model_dir)
    surveyed = survey(open_folder(model_dir), document, shorthand=quantization, on_unsupported=on_unsupported)

    with imports():
        from quant_kernels.loading.checkpoint import carry_out

    with _Shown(quiet=quiet or as_json) as progress:
        try:
            report = carry_out(
                surveyed,
                output,
                report_dir=report_dir,
                scale_rounding=scale_rounding,
                measure=measure,
                progress=progress,
            )
        except KeyboardInterrupt:
            partial = output.with_name(f"{output.name}.partial")
            sys.stderr.write(f"interrupted; the same command takes up {partial}\n")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json:
        print_json({**report.to_dict(), "report": str(report.saved_to)})
    elif not quiet:
        print_rich(report)
        for line in report.log_lines():
            print_line(line)
        print_line(f"Checkpoint written to {report.output}")
    if quiet or as_json:
        for warning in report.warnings:
            sys.stderr.write(f"warning: {printable(warning)}\n")


class _Shown:
    """Progress: a bar on a terminal, otherwise a line at every tenth, on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._done = 0
        self._started = time.perf_counter()

    def __enter__(self) -> _Shown:  # noqa: PYI034  (typing.Self needs Python 3.11)
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(bar_width=None), DownloadColumn(binary_units=True), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: int) -> None:
        """Take the bytes of the whole job."""
        self._total = total
        if self._bar is not None:
            self._task = self._bar.add_task("quantizing", total=total)

    def advance(self, nbytes: int, name: str) -> None:
        """Take the bytes of a tensor that is done, and its name."""
        before = self._done * _TENTHS // max(1, self._total)
        self._done += nbytes
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=nbytes, description=printable(name)[-_NAME_WIDTH:])
        elif not self._quiet and self._done * _TENTHS // max(1, self._total) > before:
            seconds = time.perf_counter() - self._started
            share = self._done / max(1, self._total)
            sys.stderr.write(f"{share:4.0%} of {self._total:,} bytes, {seconds:.1f} s: {printable(name)}\n")
