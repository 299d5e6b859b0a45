"""HTML of configs and plans, for notebooks. All that comes from a document is escaped; no script, no style sheet."""

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

MAX_ROWS: Final = 200
"""Rows of one table; the rest is counted."""


def _text(value: object) -> str:
    """Return text for HTML; lone surrogates of a JSON document are written out."""
    return escape(str(value).encode("utf-8", "backslashreplace").decode())


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
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
    title = f"<p><b>QuantizationConfig</b> {_text(config.quant_method or 'unquantized')}</p>"
    below = (
        "" if config.source is None else f"<details><summary>checkpoint</summary>{config_html(config.source)}</details>"
    )
    return f"<div>{title}{table}{below}</div>"


def _module_row(module: ModulePlan) -> tuple[str, ...]:
    decision = module.decision
    entry = f" {decision.entry.text} ({decision.entry.path})" if decision.entry else ""
    reason = f": {decision.reason}" if decision.reason else ""
    weights = f"{word(decision.source.weight)} → {word(decision.config.weight)}"
    return module.name, weights, word(decision.config.activation), f"{decision.why}{entry}{reason}"


def plan_html(plan: ModelPlan) -> str:
    """Return a plan as a table of its modules, with warnings above."""
    rows = map(_module_row, plan.modules[:MAX_ROWS])
    table = _table(("module", "weight", "activation", "why"), rows, len(plan.modules))
    counts = f"{len(plan.changed)} of {len(plan.modules)} modules change, {len(plan.kept)} are kept"
    warnings = "".join(f"<li>{_text(each)}</li>" for each in plan.warnings)
    listed = f"<ul>{warnings}</ul>" if warnings else ""
    return f"<div><p><b>ModelPlan</b> {counts}</p>{listed}{table}</div>"
