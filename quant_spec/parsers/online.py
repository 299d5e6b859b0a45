"""ATOM's three-field request: `global_quant_config`, `layer_quant_config`, `exclude_layer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.errors import ConfigError, join_path, unknown
from quant_spec.formats import get_format, request_words
from quant_spec.formats.base import FORMATS
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import patterns
from quant_spec.patterns import Pattern, Scope
from quant_spec.rules import EntryKey, OneOrEntries, Rule, about, any_case_schema, as_string
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD: Final = "online"


def _format(value: object) -> str:
    text = as_string(value)
    word = text.strip()
    found = FORMATS.find(word) if word.isascii() else None
    if found is None or not found.requestable or word.lower() not in (found.name, *found.aliases):
        raise ConfigError(unknown("$", "format", text, request_words()))
    return text


def _format_or_blank(value: object) -> str:
    return as_string(value) if isinstance(value, str) and not value.strip() else _format(value)


FORMAT: Final = Rule("string", _format, lambda: any_case_schema(request_words()))
FORMAT_OR_BLANK: Final = Rule("string", _format_or_blank, lambda: any_case_schema(request_words(), blank=True))


@attrs.frozen(kw_only=True)
class OnlineDocument:
    """Online quantization request: which layers are quantized to which format while a model is loaded."""

    KIND: ClassVar[str] = "online"
    CLOSED: ClassVar[bool] = True
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {
            "global_quant_config": "ptpc_fp8",
            "layer_quant_config": {"*expert*": "mxfp4"},
            "exclude_layer": ["lm_head", "*.gate.*"],
        },
    )

    global_quant_config: Annotated[str, FORMAT_OR_BLANK] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Format of every layer that no other entry names. Absent, null or empty: they stay as the checkpoint has "
            "them.",
            "ptpc_fp8",
        ),
    )
    layer_quant_config: dict[EntryKey, Annotated[str, FORMAT]] | UnsetType = attrs.field(
        default=UNSET,
        metadata=about(
            "Formats by pattern: a module name, a glob, or 're:' and a regular expression. The first that fits wins.",
            {"*.mlp.experts": "mxfp4"},
        ),
    )
    exclude_layer: OneOrEntries | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Modules that stay as the checkpoint has them, whatever the other entries say: one entry or a list.",
            ["lm_head", "*.mlp.gate"],
        ),
    )


def requested(word: str) -> LayerQuantConfig:
    """Return what a layer becomes that is asked for by the format `word`."""
    found = get_format(word)
    return LayerQuantConfig(found.weight, found.activation, METHOD)


def parse_online(request: Mapping[str, object]) -> ParsedQuantConfig:
    """Return the three-field request.

    Raises:
        ConfigError: with every defect.
    """
    document = structure(request, OnlineDocument)
    path = "$.layer_quant_config"
    listed = document.layer_quant_config or {}
    layers = tuple(
        (Pattern.parse(text, join_path(path, text), Scope.SUBTREE), requested(word)) for text, word in listed.items()
    )
    word = (document.global_quant_config or "").strip()
    return ParsedQuantConfig(
        quant_method=METHOD if word or layers else None,
        global_spec=requested(word) if word else LayerQuantConfig(),
        layer_pattern_specs=layers,
        exclude_layers=_excluded(document.exclude_layer),
    )


def _excluded(entries: str | tuple[str, ...] | UnsetType | None) -> tuple[Pattern, ...]:
    path = "$.exclude_layer"
    if isinstance(entries, str):
        return (Pattern.parse(entries, path, Scope.SUBTREE),) if entries else ()
    return patterns(entries, path, Scope.SUBTREE)


@register_quant_parser("online")
class OnlineParser:
    """Reads ATOM's three-field request."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed request; `facts` are not used."""
        return parse_online(document)
