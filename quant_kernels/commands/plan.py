"""`quant-spec plan` and `quant-spec explain`: what a request makes of a checkpoint, from its headers alone."""

from __future__ import annotations

import difflib
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quant_kernels.commands.console import paused_collector, print_json, print_line, print_log, print_rich, read_request
from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.inventory import FLOAT_DTYPES
from quant_kernels.loading.report_parts import (
    quant_dtype_name,
    reason_of,
    rule_of,
    stored_nbytes,
    unmatched_entries,
)
from quant_kernels.loading.survey import Survey, survey
from quant_spec.decision import QUANTIZABLE_KINDS
from quant_spec.errors import PlanError, shown
from quant_spec.formats import format_of_key
from quant_spec.layer_config import word

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quant_spec.plan import ModulePlan

DIGEST_OF: Final = "the request over the checkpoint's config and tensor names"
_NEAREST: Final = 3
_KEY_WIDTH: Final = 11


def run_plan(
    model_dir: Path,
    request: str,
    *,
    quantization: str | None,
    on_unsupported: str,
    on_unmatched: str,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Print the plan; with `quiet` its warnings alone."""
    document = read_request(request, "--online-quant-config")
    with paused_collector():
        surveyed = survey(
            open_folder(model_dir),
            document,
            shorthand=quantization,
            on_unsupported=on_unsupported,
            on_unmatched=on_unmatched,
        )
    if as_json:
        print_json(plan_document(surveyed))
        return
    if not quiet:
        _print_table(surveyed, verbose=verbose)
    for warning in surveyed.warnings:
        print_log(f"warning: {warning}", style="yellow")
    for entry in surveyed.plan.shadowed:
        print_log(f"note: {entry.path}: {entry.text!r} fits modules, but an entry before it decides all of them")
    if not quiet:
        print_log(f"digest {surveyed.config.digest()} ({DIGEST_OF})")


def module_bytes(surveyed: Survey, module: ModulePlan) -> tuple[int, int]:
    """Return the bytes of a module's weights before and after, scales included."""
    before = stored_nbytes(surveyed, module)
    key = module.decision.config.weight_key
    target = format_of_key(key) if key is not None and module.decision.changes else None
    if target is None:
        return before, before
    shapes = Counter(weight.shape for weight in surveyed.modules[module.name].weights)
    return before, sum(count * target.nbytes(shape) for shape, count in shapes.items() if prod(shape))


def plan_document(surveyed: Survey) -> dict[str, object]:
    """Return the plan as a JSON object."""
    layers = [module for module in surveyed.shown if surveyed.kind(module) in QUANTIZABLE_KINDS]
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
        "digest_of": DIGEST_OF,
    }


def module_document(surveyed: Survey, module: ModulePlan, sizes: tuple[int, int]) -> dict[str, object]:
    """Return one module of a plan as a JSON object."""
    decision = module.decision
    found = surveyed.found(module)
    return {
        "layer": module.name,
        "kind": surveyed.kind(module),
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
        "reason": reason_of(surveyed, module),
        "bytes_before": sizes[0],
        "bytes_after": sizes[1],
    }


def _print_table(surveyed: Survey, *, verbose: bool) -> None:
    from quant_spec.report_table import Row, because, human_bytes, layer_table

    request = _request_of(surveyed)
    rows = []
    for module in surveyed.shown:
        if surveyed.kind(module) not in QUANTIZABLE_KINDS and not verbose:
            continue
        decision = module.decision
        source = surveyed.source_word(module)
        rule = str(rule_of(decision, request))
        if decision.changes:
            final = f"{source} → {word(decision.config.weight_key)}"
            lines: tuple[str, ...] = (
                final,
                f"activation {word(decision.config.activation_key)}",
                rule,
            )
        else:
            lines = (f"{source}, kept", because(rule, reason_of(surveyed, module)))
        rows.append(Row(module.name, lines, *module_bytes(surveyed, module)))
    print_rich(layer_table(rows, each=verbose))
    total = surveyed.folder.nbytes
    saved = sum(row.bytes_before - row.bytes_after for row in rows)
    changed = len(surveyed.changed)
    kept = sum(surveyed.kind(module) in QUANTIZABLE_KINDS for module in surveyed.shown) - changed
    sizes = f"all tensors {human_bytes(total)} → {human_bytes(total - saved)} ({(total - saved) / total:.0%})"
    print_line(f"{changed} layers to be quantized, {kept} kept; {sizes}")


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
    for key, value in _explanation(surveyed, module, requested=request is not None):
        print_log(f"{key:<{_KEY_WIDTH}} {value}", indent=_KEY_WIDTH + 1)


def _explanation(surveyed: Survey, module: ModulePlan, *, requested: bool) -> Iterator[tuple[str, str]]:
    """Yield what is said of a module, key by key."""
    decision, config = module.decision, module.decision.config
    found = surveyed.found(module)
    weights = f"{len(found.weights)} weights of {_shapes(surveyed.shapes_of(module))}"
    if len(found.weights) == 1:
        weights = f"weight {_shapes(surveyed.shapes_of(module))}"
    yield "module", f"{module.name} ({surveyed.kind(module)}, {weights})"
    yield "source", _pair(surveyed.source_word(module), word(decision.source.activation_key))
    yield "weight", f"{decision.weight_word}{'' if decision.changes else ' (not converted)'}"
    said, meant = decision.activation_word, word(config.activation_key)
    yield "activation", meant if said in {meant, "source"} else f"{meant} ({said})"
    yield "engine", f"{config.quant_type}, {_engine_dtype(surveyed, module)}, dynamic: {config.is_dynamic}"
    rule = str(rule_of(decision, _request_of(surveyed)))
    yield "why", str(decision.why) if rule == str(decision.why) else f"{decision.why}: {rule}"
    if decision.entry is not None:
        yield "entry", f"{decision.entry.text!r} at {decision.entry.path}"
    reason = reason_of(surveyed, module) if requested else decision.reason
    if reason:
        yield "reason", reason
    if decision.members:
        more = ", …" if len(decision.members) > _NEAREST else ""
        yield "members", f"{len(decision.members)}: {', '.join(decision.members[:_NEAREST])}{more}"


def _pair(weight: str, activation: str) -> str:
    return weight if activation == "none" else f"{weight} x {activation}"


def _engine_dtype(surveyed: Survey, module: ModulePlan) -> str:
    config = module.decision.config
    if config.is_quantized:
        return f"torch.{config.element.torch_name}"
    dtypes = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
    stored = surveyed.found(module).weights[0].dtype
    return dtypes.get(stored, stored) if stored in FLOAT_DTYPES else stored


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _find(surveyed: Survey, name: str) -> ModulePlan:
    """Return the plan of the module called `name`; a tensor's or an expert's name stands for its module."""
    plain = name.removesuffix(".weight")
    container, middle, _ = plain.partition(".experts.")
    for candidate in (plain, f"{container}.experts" if middle else plain):
        for module in surveyed.shown:
            if module.name == candidate:
                return module
    names = [module.name for module in surveyed.shown]
    near = difflib.get_close_matches(plain, names, n=_NEAREST, cutoff=0.6)
    hint = f"; nearest: {', '.join(near)}" if near else f"; the first of {len(names)}: {', '.join(names[:_NEAREST])}"
    message = f"{shown(name)}: the checkpoint has no module of that name{hint}"
    raise PlanError(message)
