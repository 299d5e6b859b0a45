"""`quant-spec validate` and `quant-spec resolve`: a document by itself, without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.commands.console import STDIN, print_json, print_line, print_log, read_request, read_stdin
from quant_spec import QuantizationConfig, QuantSpecError
from quant_spec.errors import ConfigError, json_type, shown
from quant_spec.layer_config import word
from quant_spec.parsers.base import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUEST_KEYS: Final = frozenset(
    {"global_quant_config", "layer_quant_config", "exclude_layer", "linear", "moe", "ignore", "targets"}
)
"""Keys by which a request is told from a checkpoint's object."""


@attrs.frozen
class ReadDocument:
    """A document and what it was taken for.

    Attributes:
        kind: `request`, `quantization_config` or `config.json`.
        config: what it says.
    """

    kind: str
    config: QuantizationConfig


def read_config(given: str, what: str, *, source: str | None = None, quantization: str | None = None) -> ReadDocument:
    """Return the config in a document: a request, a `quantization_config`, or a whole config.json.

    Args:
        given: JSON text, a path, or `-`.
        what: what messages call it.
        source: a checkpoint's document for a request to be layered over, likewise.
        quantization: vLLM's shorthand word beside a request.

    Raises:
        ConfigError: with every defect of the document.
    """
    document = read_request(given, what)
    kind = document_kind(document)
    if kind == "request":
        below = None if source is None else read_config(source, "--source").config
        return ReadDocument(kind, QuantizationConfig.from_online(document, source=below, shorthand=quantization))
    if source is not None or quantization is not None:
        message = f"{what}: is a checkpoint's {kind}; --source and --quantization go with a request"
        raise QuantSpecError(message)
    return ReadDocument(kind, _checkpoint_config(kind, document))


def document_kind(document: object) -> str:
    """Tell what a document is, by its keys: `request`, `quantization_config` or `config.json`."""
    if not isinstance(document, dict) or (REQUEST_KEYS & document.keys() and "quant_method" not in document):
        return "request"
    if any(isinstance(document.get(key), dict) for key in ("quantization_config", "text_config")) or (
        {"model_type", "architectures"} & document.keys()
    ):
        return "config.json"
    checkpoint_keys = {"quant_method", "load_in_4bit", "load_in_8bit", "quantization", "quant_algo"}
    return "quantization_config" if checkpoint_keys & document.keys() else "request"


def _checkpoint_config(kind: str, document: object) -> QuantizationConfig:
    assert isinstance(document, dict)  # noqa: S101  (document_kind has just said so)
    if kind == "quantization_config":
        return QuantizationConfig.from_dict(document)
    found: object = document.get("quantization_config")
    nested = document.get("text_config")
    if found is None and isinstance(nested, dict):
        found = nested.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        message = f"$.quantization_config: expected object or null, found {json_type(found)} {shown(found)}"
        raise QuantSpecError(message)
    model_type, dtype = document.get("model_type"), document.get("torch_dtype") or document.get("dtype")
    facts = ModelFacts(
        model_type=model_type if isinstance(model_type, str) else None,
        torch_dtype=dtype if isinstance(dtype, str) else "bfloat16",
    )
    return QuantizationConfig.from_dict(found, facts=facts)


def run_validate(given: str, *, source: str | None, quantization: str | None, as_json: bool, quiet: bool) -> None:
    """Say that a document is valid and what it says in short; a refusal lists every defect."""
    read = read_config(given, "DOCUMENT", source=source, quantization=quantization)
    config = read.config
    summary = {
        "valid": True,
        "kind": read.kind,
        "quant_method": config.quant_method,
        "global": {"weight": word(config.global_spec.weight), "activation": word(config.global_spec.activation)},
        "patterns": len(config.layer_pattern_specs),
        "excludes": len(config.exclude_layers),
        "classes": len(config.class_specs),
        "kv_cache": None if config.kv_cache is None else str(config.kv_cache),
        "digest": config.digest(),
        "digest_of": _digest_of(read.kind, source),
    }
    if as_json:
        print_json(summary)
    if as_json or quiet:
        return
    print_log(f"valid {read.kind}, quant_method {config.quant_method or 'none'}")
    print_log(f"global {config.global_spec}")
    for entry, spec in (*config.layer_pattern_specs, *config.class_specs):
        print_log(f"{entry.path}: {entry.text!r} -> {spec}")
    for entry in config.exclude_layers:
        print_log(f"{entry.path}: {entry.text!r} excluded")
    print_log(f"digest {summary['digest']} ({summary['digest_of']})")


def _digest_of(kind: str, source: str | None) -> str:
    """Return what a digest covers: `plan` covers the names of a checkpoint's tensors too, so its digest differs."""
    if kind != "request":
        return f"the {kind} alone"
    return "the request alone" if source is None else "the request over the config given"


def run_resolve(given: str, *, source: str | None, quantization: str | None, as_json: bool) -> None:
    """Print the format of every module whose name stands on a line of standard input."""
    if STDIN in {given, source}:
        message = "CONFIG: '-' cannot be used here: standard input holds the names of modules; give JSON text or a file"
        raise QuantSpecError(message)
    config = read_config(given, "CONFIG", source=source, quantization=quantization).config
    try:
        names = [line.strip() for line in read_stdin("NAMES").decode().splitlines()]
    except UnicodeDecodeError as error:
        message = f"<stdin>: names must be UTF-8: {error.reason} at byte {error.start}"
        raise QuantSpecError(message) from None
    rows = [_row(config, name) for name in names if name]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_line("\t".join(str(row[key] or "") for key in ("layer", "weight", "activation", "why", "entry")))


def _row(config: QuantizationConfig, name: str) -> Mapping[str, str | None]:
    decision = config.explain(name)
    return {
        "layer": name,
        "weight": decision.weight_word,
        "activation": decision.activation_word,
        "quant_type": decision.config.quant_type,
        "why": str(decision.why),
        "entry": decision.entry.text if decision.entry else None,
        "path": decision.entry.path if decision.entry else None,
    }


__all__ = ["ConfigError", "ReadDocument", "read_config", "run_resolve", "run_validate"]
