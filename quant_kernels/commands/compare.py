"""`quant-spec compare`: how far one checkpoint's weights are from another's, the worst layers first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from quant_kernels.commands.console import imports, print_json, print_log, print_rich, printable
from quant_kernels.commands.progress import ShownProgress
from quant_spec import QuantSpecError

if TYPE_CHECKING:
    from pathlib import Path

    from quant_kernels.loading.compare import Comparison, LayerComparison

SHOWN: Final = 20
"""Layers that are listed unless all are asked for."""


def run(left: Path, right: Path, *, html: Path | None, verbose: bool, as_json: bool, quiet: bool) -> None:
    """Compare, then print the table or the JSON document, and write the page if a file for it is given."""
    if html is not None and html.exists():
        message = f"--html: {html} exists; choose another name or remove it"
        raise QuantSpecError(message)
    from quant_kernels.loading.folder import open_folder

    for folder in (left, right):
        open_folder(folder)
    with imports():
        from quant_kernels.loading.compare import compare_checkpoints

    with ShownProgress(quiet=quiet or as_json, in_bytes=False) as progress:
        found = compare_checkpoints(left, right, progress=progress)
    if html is not None:
        from quant_kernels.commands.compare_page import compare_page

        try:
            html.write_text(compare_page(found), "utf-8")
        except OSError as error:
            message = f"{html}: cannot be written: {error.strerror or error}"
            raise QuantSpecError(message) from error
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        _print(found, verbose=verbose)
        if html is not None:
            print_log(f"Page written to {html}")
    for name, why in found.skipped.items():
        sys.stderr.write(f"warning: {printable(name)}: not compared: {printable(why)}\n")


def _print(found: Comparison, *, verbose: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    differing = [each for each in found.layers if not each.identical]
    listed = list(found.layers) if verbose else differing[:SHOWN]
    if listed:
        made = Table(box=None, pad_edge=False, header_style="bold")
        made.add_column("layer", overflow="fold")
        for head in ("SQNR, dB", "largest error", "cosine"):
            made.add_column(head, justify="right", no_wrap=True)
        for each in listed:
            formats = each.left if each.left == each.right else f"{each.left} → {each.right}"
            name = Text(printable(each.layer)).append(f"\n{printable(formats)}", style="dim")
            made.add_row(name, *_figures(each))
        print_rich(made)
    rest = len(differing) - len(listed)
    if rest > 0:
        print_log(f"and {rest:,} layers with a higher SQNR; --verbose lists all")
    for side, names in (("first", found.only_left), ("second", found.only_right)):
        if names:
            more = ", …" if len(names) > 1 else ""
            print_log(f"only in the {side}: {len(names):,} tensors: {names[0]}{more}")
    same = len(found.layers) - len(differing)
    total = "" if found.sqnr_db is None else f"; {found.sqnr_db:.2f} dB over all values"
    print_log(f"{len(differing):,} layers differ, {same:,} are the same{total}")


def _figures(each: LayerComparison) -> tuple[str, str, str]:
    ratio = "same" if each.identical else "none" if each.sqnr_db is None else f"{each.sqnr_db:.2f}"
    error = "NaN or Inf" if each.max_error is None else f"{each.max_error:.3g}"
    return ratio, error, "none" if each.cosine is None else f"{each.cosine:.6f}"
