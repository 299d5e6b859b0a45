"""The directive `format-table`: one row a registered format, read from the registry while the page is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from quant_spec import formats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sphinx.application import Sphinx

    from quant_spec import QuantFormat


def words(values: Iterable[object]) -> str:
    """Values as literals with commas between them, or a dash."""
    return ", ".join(f"`{value}`" for value in values) or "–"


def row(entry: QuantFormat) -> str:
    """One format as a row of a MyST table."""
    activation = "none" if entry.activation is None else f"`{entry.activation}`"
    allowed = words(key for key in entry.activations if key is not None)
    cells = [
        f"`{entry.name}`",
        words(entry.aliases),
        f"`{entry.weight}`",
        activation,
        allowed,
        words(entry.scale_roundings),
        str(entry.k_multiple),
    ]
    return f"| {' | '.join(cells)} |"


class FormatTable(SphinxDirective):
    """Formats that a request may name; with the option `sources`, those known as sources only."""

    option_spec = {"sources": lambda argument: argument is None}  # noqa: RUF012  (docutils reads it from the class)

    def run(self) -> list[nodes.Node]:
        """Parse the table as if it had been written into the page."""
        wanted = "sources" not in self.options
        heads = ["name", "aliases", "weight", "default activation", "allowed activations", "rounding", "K multiple"]
        lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        lines += [row(entry) for entry in formats() if entry.requestable == wanted]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("format-table", FormatTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
