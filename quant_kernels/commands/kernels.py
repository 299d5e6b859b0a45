"""`quant-spec kernels`: what this machine and build can do, and whether hardware agrees with software."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from quant_kernels.commands.console import ExitCode, imports, print_json, print_line
from quant_kernels.commands.progress import ShownProgress

if TYPE_CHECKING:
    from quant_kernels.selftest import SelfTestReport


def run(*, self_test: bool, as_json: bool, quiet: bool) -> None:
    """Print the capabilities; with `self_test` compare every conversion with the reference."""
    found = capabilities()
    report = _self_test(quiet=quiet or as_json) if self_test else None
    if as_json:
        print_json(found if report is None else {**found, "self_test": _document(report)})
    elif not quiet:
        for key, value in found.items():
            print_line(f"{key:<10} {_text(value)}")
        if report is not None:
            print_line(f"{'self-test':<10} {report.verdict}")
    if report is not None and not report.passed:
        for each in report.comparisons:
            if each.differing:
                sys.stderr.write(f"error: {each.name}: {each.differing:,} of {each.compared:,} differ: ")
                sys.stderr.write(f"{', '.join(each.examples)}\n")
        raise typer.Exit(ExitCode.SELF_TEST_FAILED)


def capabilities() -> dict[str, object]:
    """Return the library in use, the devices it serves, and the formats with kernels. Imports torch."""
    with imports():
        import torch

        from quant_kernels.library import cpu_isa, library_path, load_library, native_on
        from quant_kernels.targets import TARGETS

    path = library_path()
    return {
        "torch": torch.__version__,
        "library": str(path) if path is not None and load_library() else None,
        "cpu": cpu_isa(),
        "cuda": torch.cuda.is_available() and native_on("cuda"),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "formats": sorted(TARGETS),
    }


def _self_test(*, quiet: bool) -> SelfTestReport:
    from quant_kernels import selftest

    with ShownProgress(quiet=quiet, in_bytes=False) as progress:

        def notify(done: int, total: int, name: str) -> None:
            if done == 1:
                progress.start(total)
            progress.advance(1, name)

        return selftest.run(notify=notify)


def _document(report: SelfTestReport) -> dict[str, object]:
    comparisons = [
        {"name": each.name, "compared": each.compared, "differing": each.differing, "examples": list(each.examples)}
        for each in report.comparisons
    ]
    return {
        "passed": report.passed,
        "device": report.device,
        "against": report.against,
        "seconds": report.seconds,
        "comparisons": comparisons,
    }


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none: conversions run in plain torch"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
