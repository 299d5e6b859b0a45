"""`quant-spec report`: the file of a report as a table or as a page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quant_kernels.commands.console import print_json, print_log, print_rich, printable
from quant_spec import QuantSpecError
from quant_spec.report import ReportError
from quant_spec.report_file import read_report

if TYPE_CHECKING:
    from pathlib import Path


def run(file: Path, *, html: Path | None, as_json: bool, quiet: bool) -> None:
    """Print the report's table, and write its page if a file for it is given."""
    report = read_report(file)
    if html is not None:
        try:
            report.write_page(html)
        except ReportError as error:
            # Here the page is all that there is to do.
            raise QuantSpecError(f"{html}: cannot be written: {error.__cause__}") from error
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        print_rich(report)
        for line in report.log_lines()[:-1]:
            print_log(line)
        if html is not None:
            print_log(f"Page written to {html}")
    if quiet:
        for warning in report.warnings:
            sys.stderr.write(f"warning: {printable(warning)}\n")
