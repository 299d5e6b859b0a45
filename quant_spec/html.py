"""HTML of configs, plans and reports, for notebooks; all from outside is escaped; no script, no style sheet."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from quant_spec.layer_config import word

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quant_spec.config import QuantizationConfig
    from quant_spec.layer_config import LayerQuantConfig
    from quant_spec.patterns import Pattern
    from quant_spec.plan import ModelPlan, ModulePlan
    from quant_spec.report import QuantReport

MAX_ROWS: Final = 200
"""Rows of one table; the rest is counted."""


def escaped(value: object) -> str:
    r"""Return text for HTML; what is no printable character (controls, surrogates, text direction) is written out.

    >>> escaped("<b>"), escaped(chr(27)), escaped("a" + chr(0x202E))
    ('&lt;b&gt;', '\\x1b', 'a\\u202e')
    """
    text = str(value)
    if not text.isprintable():
        shown = (
            each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
        )
        text = "".join(shown)
    return escape(text)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    head = "".join(f"<th>{escaped(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    more = total - MAX_ROWS
    rest = f'<tr><td colspan="{len(heads)}">and {more} more</td></tr>' if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}{rest}</tbody></table>"


def _entry_row(entry: Pattern, spec: LayerQuantConfig | None) -> tuple[str, ...]:
    if spec is None:
        return entry.text, "kept as it is", "", entry.path
    return entry.text, word(spec.weight), word(spec.activation), entry.path


def config_html(config: QuantizationConfig) -> str:
    """Return a config as a table of its entries in order of precedence, the global format last."""
    entries: list[tuple[Pattern, LayerQuantConfig | None]] = [
        *((entry, None) for entry in config.exclude_layers),
        *config.layer_pattern_specs,
        *config.class_specs,
    ]
    rows = [_entry_row(entry, spec) for entry, spec in entries[:MAX_ROWS]]
    rows.append(("everything else", word(config.global_spec.weight), word(config.global_spec.activation), ""))
    table = _table(("entry", "weight", "activation", "path"), rows, len(entries))
    title = f"<p><b>QuantizationConfig</b> {escaped(config.quant_method or 'unquantized')}</p>"
    below = (
        "" if config.source is None else f"<details><summary>checkpoint</summary>{config_html(config.source)}</details>"
    )
    return f"<div>{title}{table}{below}</div>"


def _module_row(module: ModulePlan) -> tuple[str, ...]:
    decision = module.decision
    entry = f" {decision.entry.text} ({decision.entry.path})" if decision.entry else ""
    reason = f": {decision.reason}" if decision.reason else ""
    stored = word(decision.source.weight)
    weights = f"{stored} → {word(decision.config.weight)}" if decision.changes else f"{stored}, kept"
    return module.name, weights, word(decision.config.activation), f"{decision.why}{entry}{reason}"


def plan_html(plan: ModelPlan) -> str:
    """Return a plan as a table of its modules, with warnings above."""
    rows = map(_module_row, plan.modules[:MAX_ROWS])
    table = _table(("module", "weight", "activation", "why"), rows, len(plan.modules))
    counts = f"{len(plan.changed)} of {len(plan.modules)} modules change"
    if plan.kept:
        counts += f", {len(plan.kept)} that were asked for cannot"
    return f"<div><p><b>ModelPlan</b> {counts}</p>{_listed(plan.warnings)}{table}</div>"


def report_html(report: QuantReport) -> str:
    """Return a report as a table of its layers, the kept ones last, with warnings above."""
    from quant_spec.report_table import because, human_bytes, totals  # noqa: PLC0415  (rich is needed for it)

    rows = [
        (
            layer.layer,
            f"{layer.source} → {layer.target}",
            layer.activation,
            str(layer.rule),
            f"{human_bytes(layer.bytes_before)} → {human_bytes(layer.bytes_after)}",
        )
        for layer in report.layers
    ]
    rows += [
        (layer.layer, f"{layer.source}, kept", "", because(str(layer.rule), layer.reason), human_bytes(layer.nbytes))
        for layer in report.kept
    ]
    table = _table(("layer", "weight", "activation", "why", "size"), rows[:MAX_ROWS], len(rows))
    title = f"<p><b>QuantReport</b> {escaped(report.model)}: {escaped(totals(report))}</p>"
    return f"<div>{title}{_listed(report.warnings)}{table}</div>"


def _listed(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
