"""The directive `import-picture`: the modules of a package as boxes in layers, drawn from its own import statements."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
BOX_HEIGHT, GAP, ROW_HEIGHT, CHARACTER = 26, 12, 62, 7.4
STYLE = """
<style>
 .import-picture { max-width: 100%; height: auto; font: 12px ui-monospace, monospace; }
 .import-picture rect { fill: var(--color-background-secondary); stroke: var(--color-foreground-muted); }
 .import-picture text { fill: var(--color-foreground-primary); text-anchor: middle; dominant-baseline: central; }
 .import-picture path { fill: none; stroke: var(--color-foreground-muted); opacity: .45; }
</style>
"""


def module_imports(package: str) -> dict[str, set[str]]:
    """First-level modules and subpackages of a package, each with those of its siblings that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts == ("__init__",):
            continue
        names = graph.setdefault(parts[0], set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                dotted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                dotted = [alias.name for alias in node.names]
            else:
                continue
            names.update(name.split(".")[1] for name in dotted if name.startswith(f"{package}."))
    return {name: {other for other in others if other in graph and other != name} for name, others in graph.items()}


def reduced(graph: dict[str, set[str]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Depth of each module, and the imports that do not follow from others.

    An import that a function makes late may close a cycle; such an edge does not count for the depth.
    """
    path: list[str] = []

    @cache
    def depth(name: str) -> int:
        path.append(name)
        below = [depth(other) for other in sorted(graph[name]) if other not in path]
        path.pop()
        return 1 + max(below, default=-1)

    depths = {name: depth(name) for name in sorted(graph)}
    down = {name: {other for other in graph[name] if depths[other] < depths[name]} for name in graph}

    @cache
    def reach(name: str) -> frozenset[str]:
        return frozenset(down[name]).union(*(reach(other) for other in down[name]))

    edges = [
        (name, other)
        for name in sorted(down)
        for other in sorted(down[name])
        if not any(other in reach(between) for between in down[name] - {other})
    ]
    return depths, edges


def svg(package: str) -> str:
    """The picture: what imports nothing of the package is at the bottom, and lines lead down to what is imported."""
    depths, edges = reduced(module_imports(package))
    rows = [[name for name in depths if depths[name] == level] for level in range(max(depths.values()) + 1)]
    widths = {name: CHARACTER * len(name) + 18 for name in depths}
    total = max(sum(widths[name] + GAP for name in row) for row in rows) + GAP
    height = ROW_HEIGHT * len(rows)
    center: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        x = (total - sum(widths[name] + GAP for name in row) + GAP) / 2
        y = height - ROW_HEIGHT * level - ROW_HEIGHT / 2
        for name in row:
            center[name] = (x + widths[name] / 2, y)
            x += widths[name] + GAP
    parts = [f'<svg class="import-picture" viewBox="0 0 {total:.0f} {height}" width="{total:.0f}" role="img">']
    parts.append(f"<title>Modules of {package}; lines lead down to what a module imports</title>")
    for upper, lower in edges:
        (x1, y1), (x2, y2) = center[upper], center[lower]
        start, end = y1 + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
        bend = (start + end) / 2
        parts.append(f'<path d="M{x1:.0f} {start:.0f}C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {end:.0f}"/>')
    for name, (x, y) in center.items():
        left, top = x - widths[name] / 2, y - BOX_HEIGHT / 2
        parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{widths[name]:.0f}" height="{BOX_HEIGHT}" rx="4"/>')
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}">{name}</text>')
    return "".join([*parts, "</svg>"])


class ImportPicture(SphinxDirective):
    """An inline SVG of the package that the argument names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Draw the picture; pages are built for HTML alone."""
        return [nodes.raw("", STYLE + svg(self.arguments[0]), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("import-picture", ImportPicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
