"""The report as a table for a terminal of 80 columns and more."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import attrs
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quant_spec.report import layer_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_spec.report import QuantReport

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_THREE_DIGITS: Final = 3


@attrs.frozen
class Row:
    """One layer of a table.

    Attributes:
        layer: its name.
        lines: what becomes of it and why; layers with the same lines share a row of the table.
        bytes_before: bytes of its weights and scales before.
        bytes_after: the same after.
    """

    layer: str
    lines: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def human_bytes(count: int) -> str:
    """Return a number of bytes with three significant digits and a binary unit.

    >>> human_bytes(269030016), human_bytes(512)
    ('257 MiB', '512 B')
    """
    for size, unit in _UNITS:
        if count >= size:
            value = count / size
            return f"{value:.{max(0, _THREE_DIGITS - len(str(int(value))))}f} {unit}"
    return f"{count} B"


def render(report: QuantReport) -> Group:
    """Return the table of what became what and why, what was kept, sizes, and warnings."""
    rows = [
        Row(
            layer.layer,
            (f"{layer.source} → {layer.target}", f"activation {layer.activation}", str(layer.rule)),
            layer.bytes_before,
            layer.bytes_after,
        )
        for layer in report.layers
    ]
    rows += [
        Row(layer.layer, (f"{layer.source}, kept", because(str(layer.rule), layer.reason)), layer.nbytes, layer.nbytes)
        for layer in report.kept
    ]
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    return Group(layer_table(rows), Text(totals(report)), *warnings)


def because(rule: str, reason: str) -> str:
    """Return a rule and the reason for an exception to it in one phrase; a rule that names no entry says nothing."""
    names_an_entry = ":" in rule
    return f"{reason} ({rule})" if reason and names_an_entry else reason or rule


def totals(report: QuantReport) -> str:
    """Return the closing line: layers quantized and kept, bytes before and after."""
    sizes = f"{human_bytes(report.bytes_before)} → {human_bytes(report.bytes_after)}"
    share = f" ({report.bytes_after / report.bytes_before:.0%})" if report.bytes_before else ""
    return f"{report.num_layers} layers quantized, {len(report.kept)} kept; all tensors {sizes}{share}"


def layer_table(rows: Iterable[Row], *, each: bool = False) -> Table:
    """Return a table with one row for all layers of which the same is said.

    Args:
        rows: the layers.
        each: True for one row a layer.
    """
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.layer, *row.lines) if each else row.lines].append(row)
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("layers", overflow="fold", ratio=2)
    table.add_column("n", justify="right")
    table.add_column("what and why", overflow="fold", ratio=3)
    table.add_column("size", justify="right", no_wrap=True)
    for group in groups.values():
        if table.row_count and not each:
            table.add_row()
        before, after = sum(row.bytes_before for row in group), sum(row.bytes_after for row in group)
        size = human_bytes(before) if before == after else f"{human_bytes(before)} → {human_bytes(after)}"
        kinds = [group[0].layer] if each else dict.fromkeys(layer_type(row.layer) for row in group)
        table.add_row(Text("\n".join(kinds)), str(len(group)), Text("\n".join(group[0].lines)), size)
    return table
