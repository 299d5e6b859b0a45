"""The directives `activation-table` and `backend-table`, read from the registries while the page is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from quant_spec import formats
from quant_spec.backends import BACKENDS
from quant_spec.layer_config import word
from quant_spec.vllm_names import vllm_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sphinx.application import Sphinx

    from quant_spec import QuantKey


def literal(values: Iterable[str]) -> str:
    """Values as literals with commas between them, or a dash."""
    return ", ".join(f"`{value}`" for value in dict.fromkeys(values)) or "–"


def named(key: QuantKey | None) -> str:
    """A key as its word, with vLLM's name where that is another."""
    name = None if key is None else vllm_name(key)
    return f"`{word(key)}`" + (f" (vLLM: `{name}`)" if name and name != word(key) else "")


class Table(SphinxDirective):
    """Parses rows as if they had been written into the page."""

    heads: tuple[str, ...] = ()

    def rows(self) -> Iterable[tuple[str, ...]]:
        """Return the cells, a tuple a row."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the table's nodes."""
        lines = [f"| {' | '.join(cells)} |" for cells in (self.heads, *self.rows())]
        lines.insert(1, f"|{' --- |' * len(self.heads)}")
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, container)
        return container.children


class ActivationTable(Table):
    """Default and allowed activations of every registered format."""

    heads = ("words", "weight", "default activation", "other allowed activations")

    def rows(self) -> Iterable[tuple[str, ...]]:
        """Return a row a format."""
        for each in formats():
            others = [key for key in each.activations if key != each.activation]
            words = literal((each.name, *each.aliases, *each.shorthands))
            yield words, f"`{each.weight}`", named(each.activation), ", ".join(map(named, others)) or "–"


class BackendTable(Table):
    """Backends by kind and priority."""

    heads = ("backend", "layers", "weight", "activations", "architectures", "priority")

    def rows(self) -> Iterable[tuple[str, ...]]:
        """Return a row a backend."""
        for each in BACKENDS:
            activations = literal(word(key) for key in each.activations)
            weight = f"`{word(each.weight)}`"
            yield f"`{each.name}`", each.kind, weight, activations, literal(each.architectures), str(each.priority)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("activation-table", ActivationTable)
    app.add_directive("backend-table", BackendTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
