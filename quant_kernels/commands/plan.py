"""`quant-spec plan` and `quant-spec explain`: what a request makes of a checkpoint, from its headers alone."""

from __future__ import annotations

import difflib
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quant_kernels.commands.console import paused_collector, print_json, print_line, print_rich, read_request
from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.inventory import FLOAT_DTYPES
from quant_kernels.loading.report_parts import quant_dtype_name, rule_of, stored_nbytes, unmatched_entries
from quant_kernels.loading.survey import Survey, survey
from quant_spec.errors import PlanError, shown
from quant_spec.formats import format_of_key
from quant_spec.layer_config import word

if TYPE_CHECKING:
    from quant_spec.plan import ModulePlan

_NEAREST: Final = 3
_KINDS: Final = frozenset({"linear", "moe"})


def load(model_dir: Path, request: str | None, *, quantization: str | None, on_unsupported: str = "keep") -> Survey:
    """Return the plan of a request over a checkpoint; without a request, of the checkpoint's own config."""
    document = None if request is None else read_request(request, "--online-quant-config")
    with paused_collector():
        return survey(open_folder(model_dir), document, shorthand=quantization, on_unsupported=on_unsupported)


def run_plan(
    model_dir: Path, request: str | None, *, quantization: str | None, on_unsupported: str, as_json: bool, verbose: bool
) -> None:
    """Print the plan."""
    surveyed = load(model_dir, request, quantization=quantization, on_unsupported=on_unsupported)
    if as_json:
        print_json(plan_document(surveyed))
        return
    _print_table(surveyed, verbose=verbose)
    for warning in surveyed.warnings:
        print_line(f"warning: {warning}")
    for entry in surveyed.plan.shadowed:
        print_line(f"note: {entry.path}: {entry.text!r} fits modules, but an entry before it decides all of them")


def module_bytes(surveyed: Survey, module: ModulePlan) -> tuple[int, int]:
    """Return the bytes of a module's weights before and after, scales included."""
    found = surveyed.modules[module.name]
    before = stored_nbytes(surveyed, found)
    key = module.decision.config.weight_key
    target = format_of_key(key) if key is not None and module.decision.changes else None
    if target is None:
        return before, before
    shapes = Counter(weight.shape for weight in found.weights)
    return before, sum(count * target.nbytes(shape) for shape, count in shapes.items() if prod(shape))


def plan_document(surveyed: Survey) -> dict[str, object]:
    """Return the plan as a JSON object."""
    layers = [module for module in surveyed.plan.modules if surveyed.modules[module.name].kind in _KINDS]
    sizes = {module.name: module_bytes(surveyed, module) for module in layers}
    saved = sum(before - after for before, after in sizes.values())
    total = surveyed.folder.nbytes
    return {
        "model": str(surveyed.folder.path),
        "num_layers": len(surveyed.changed),
        "modules": [module_document(surveyed, module, sizes[module.name]) for module in layers],
        "unmatched": [
            {"entry": each.entry, "path": each.path, "nearest": list(each.nearest)}
            for each in unmatched_entries(surveyed)
        ],
        "shadowed": [{"entry": entry.text, "path": entry.path} for entry in surveyed.plan.shadowed],
        "match_counts": dict(surveyed.plan.match_counts),
        "warnings": list(surveyed.warnings),
        "bytes_before": total,
        "bytes_after": total - saved,
        "digest": surveyed.config.digest(),
    }


def module_document(surveyed: Survey, module: ModulePlan, sizes: tuple[int, int]) -> dict[str, object]:
    """Return one module of a plan as a JSON object."""
    decision = module.decision
    found = surveyed.modules[module.name]
    return {
        "layer": module.name,
        "kind": found.kind,
        "shapes": [list(shape) for shape in surveyed.shapes_of(module)],
        "weights": len(found.weights),
        "source": surveyed.source_word(module),
        "changes": decision.changes,
        "weight": decision.weight_word,
        "activation": decision.activation_word,
        "quant_type": decision.config.quant_type,
        "quant_dtype": quant_dtype_name(decision.config.element.torch_name, decision.config.element.bits),
        "why": str(decision.why),
        "entry": decision.entry.text if decision.entry else None,
        "path": decision.entry.path if decision.entry else None,
        "reason": decision.reason,
        "bytes_before": sizes[0],
        "bytes_after": sizes[1],
    }


def _print_table(surveyed: Survey, *, verbose: bool) -> None:
    from quant_spec.report_table import Row, because, human_bytes, layer_table

    request = _request_of(surveyed)
    rows = []
    for module in surveyed.plan.modules:
        if surveyed.modules[module.name].kind not in _KINDS and not verbose:
            continue
        decision = module.decision
        source = surveyed.source_word(module)
        rule = str(rule_of(decision, request))
        if decision.changes:
            final = f"{source} → {word(decision.config.weight_key)}"
            lines: tuple[str, ...] = (
                final,
                f"activation {word(decision.config.activation_key)}",
                f"{decision.why}: {rule}",
            )
        else:
            lines = (f"{source}, kept", f"{decision.why}: {because(rule, decision.reason)}")
        rows.append(Row(module.name, lines, *module_bytes(surveyed, module)))
    print_rich(layer_table(rows, each=verbose))
    total = surveyed.folder.nbytes
    saved = sum(row.bytes_before - row.bytes_after for row in rows)
    changed = len(surveyed.changed)
    print_line(f"{changed} layers to be quantized; all tensors {human_bytes(total)} → {human_bytes(total - saved)}")


def _request_of(surveyed: Survey) -> object:
    document = surveyed.config.to_dict()
    if document is None:
        return None
    return document.get("request") if surveyed.config.source is not None else document


def run_explain(model_dir: Path, name: str, request: str | None, *, quantization: str | None, as_json: bool) -> None:
    """Print what one module becomes and why."""
    document = None if request is None else read_request(request, "--online-quant-config")
    with paused_collector():
        surveyed = survey(open_folder(model_dir), document, shorthand=quantization, allow_unchanged=True)
    module = _find(surveyed, name)
    if as_json:
        print_json(module_document(surveyed, module, module_bytes(surveyed, module)))
        return
    decision = module.decision
    found = surveyed.modules[module.name]
    print_line(
        f"module      {module.name} ({found.kind}, {len(found.weights)} weights {_shapes(surveyed.shapes_of(module))})"
    )
    print_line(f"source      {surveyed.source_word(module)} x {word(decision.source.activation_key)}")
    print_line(f"weight      {decision.weight_word}{'' if decision.changes else ' (not converted)'}")
    print_line(f"activation  {decision.activation_word} = {word(decision.config.activation_key)}")
    engine = f"{decision.config.quant_type}, {_engine_dtype(surveyed, module)}"
    print_line(f"engine      {engine}, dynamic: {decision.config.is_dynamic}")
    print_line(f"why         {decision.why}: {rule_of(decision, _request_of(surveyed))}")
    if decision.entry is not None:
        print_line(f"entry       {decision.entry.text!r} at {decision.entry.path}")
    if decision.reason:
        print_line(f"reason      {decision.reason}")
    if decision.members:
        print_line(f"members     {len(decision.members)}: {', '.join(decision.members[:_NEAREST])}, …")


def _engine_dtype(surveyed: Survey, module: ModulePlan) -> str:
    config = module.decision.config
    if config.is_quantized:
        return f"torch.{config.element.torch_name}"
    dtypes = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
    stored = surveyed.modules[module.name].weights[0].dtype
    return dtypes.get(stored, stored) if stored in FLOAT_DTYPES else stored


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _find(surveyed: Survey, name: str) -> ModulePlan:
    """Return the plan of the module called `name`; a tensor's or an expert's name stands for its module."""
    plain = name.removesuffix(".weight")
    container, middle, _ = plain.partition(".experts.")
    for candidate in (plain, f"{container}.experts" if middle else plain):
        for module in surveyed.plan.modules:
            if module.name == candidate:
                return module
    names = [module.name for module in surveyed.plan.modules]
    near = difflib.get_close_matches(plain, names, n=_NEAREST, cutoff=0.6)
    hint = f"; nearest: {', '.join(near)}" if near else f"; the first of {len(names)}: {', '.join(names[:_NEAREST])}"
    message = f"{shown(name)}: the checkpoint has no module of that name{hint}"
    raise PlanError(message)
