"""`quant-spec recommend`: measure a checkpoint's layers, and print the request that makes the best of its bytes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from quant_kernels.commands.console import console, imports, print_json, printable
from quant_kernels.commands.progress import ShownProgress

if TYPE_CHECKING:
    from pathlib import Path

    from quant_kernels.recommend.recommendation import Recommendation


def run(
    model_dir: Path,
    *,
    max_bytes: float | None,
    min_sqnr: float | None,
    formats: str,
    objective: str,
    granularity: str,
    scale_rounding: str | None,
    svg: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the request to standard output, and the table of what it does to standard error."""
    from quant_kernels.loading.folder import open_folder

    folder = open_folder(model_dir)
    with imports():
        from quant_kernels.recommend.measure import measure
        from quant_kernels.recommend.picture import curve_svg
        from quant_kernels.recommend.recommendation import recommend
    total = sum(tensor.nbytes for tensor in folder.tensors.values())
    with ShownProgress(quiet=quiet or as_json) as progress:
        progress.start(total)
        measured = measure(
            folder,
            [name.strip() for name in formats.split(",") if name.strip()],
            scale_rounding=scale_rounding,
            progress=progress.advance,
        )
    found = recommend(measured, max_bytes=max_bytes, min_sqnr=min_sqnr, objective=objective, granularity=granularity)
    if svg is not None:
        svg.write_text(curve_svg(measured, found.chosen, found.whole, title=f"{model_dir.name}: {objective} error"))
    if as_json:
        print_json(_document(found))
        return
    if not quiet:
        _print_table(found, objective)
    sys.stdout.write(json.dumps(found.request, indent=2) + "\n")


def _print_table(found: Recommendation, objective: str) -> None:
    from rich.table import Table

    from quant_kernels.recommend.recommendation import by_kind
    from quant_spec.report_table import human_bytes

    table = Table("layers of the kind", "format", "n", "bytes", "SQNR dB", pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for (template, word), reasons in sorted(by_kind(found).items()):
        ratios = [reason.unit.sqnr_db(reason.option) for reason in reasons]
        exact = reasons[0].option.format is None
        span = "" if exact else f"{min(ratios):.1f}-{max(ratios):.1f}" if len(ratios) > 1 else f"{ratios[0]:.1f}"
        size = human_bytes(sum(reason.option.nbytes for reason in reasons))
        table.add_row(printable(template), word, str(len(reasons)), size, span)
    shown = console(stderr=True)
    shown.print(table)
    before, after = human_bytes(found.measured.nbytes), human_bytes(found.chosen.nbytes)
    shown.print(f"{before} -> {after} ({found.fraction:.1%}); {objective} error {found.chosen.error:.4g}", markup=False)
    for name, point in found.whole.items():
        share = point.nbytes / found.measured.nbytes
        shown.print(f"  all layers {name}: {share:.1%}, error {point.error:.4g}", markup=False)
    for name, reason in found.measured.left_out.items():
        shown.print(f"  left as it is: {printable(name)}: {reason}", markup=False)


def _document(found: Recommendation) -> dict[str, object]:
    return {
        "online_quant_config": found.request,
        "bytes_before": found.measured.nbytes,
        "bytes_after": found.chosen.nbytes,
        "error": found.chosen.error,
        "layers": [
            {
                "layer": module,
                "unit": reason.unit.name,
                "format": reason.option.format,
                "sqnr_db": None if reason.option.noise == 0 else reason.unit.sqnr_db(reason.option),
                "reason": reason.text,
            }
            for reason in found.reasons
            for module in reason.unit.modules
        ],
        "left_out": found.measured.left_out,
        "curve": [{"bytes": point.nbytes, "error": point.error} for point in found.chosen.curve],
    }
