"""`mxfp8` (MiniMax-M3 and others) and `mxfp4` (gpt-oss)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.errors import ConfigError, Defect, shown, wrong_type
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.generic.fp8 import FMT, MANIFEST_ALGO, SCALE_FMT
from quant_spec.parsers.reading import EXCLUDE_KEYS, FP8_STATIC, joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4
from quant_spec.rules import Entries, Rule, about, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP: Final = [1, 32]


def _group(value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(wrong_type("$", value, "list"))
    if list(value) != _GROUP or any(isinstance(each, bool) for each in value):
        problem = f"weight_block_size {shown(value)} contradicts mxfp8, whose scales are one for 32 elements of a row"
        raise ConfigError(Defect("$", problem, value, ("[1, 32]",)))
    return 1, 32


GROUP: Final = Rule("list", _group, lambda: {"const": _GROUP})


@attrs.frozen(kw_only=True)
class Mxfp8Document:
    """MXFP8 checkpoint (quant_method `mxfp8`)."""

    KIND: ClassVar[str] = "mxfp8"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]},
    )

    quant_method: Annotated[str, word("quant_method", ("mxfp8",))] = attrs.field(metadata=about("Always `mxfp8`."))
    fmt: Annotated[str, FMT] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type; absent: e4m3.", "e4m3")
    )
    scale_fmt: Annotated[str, SCALE_FMT] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Scales are powers of two, which they always are here.", "ue8m0")
    )
    weight_block_size: Annotated[tuple[int, int], GROUP] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("A group of 32 along the input side.", [1, 32])
    )
    activation_scheme: Annotated[str, word("activation_scheme", ("dynamic",))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Scales of activations are made at run time.", "dynamic")
    )
    ignored_layers: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    exclude_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    moe_quant_algo: Annotated[str, MANIFEST_ALGO] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Format of the routed experts where it is not MXFP8.", "NVFP4")
    )
    kv_cache_quant_algo: Annotated[str, word("kv_cache_quant_algo", ("FP8",), any_case=True)] | UnsetType | None = (
        attrs.field(default=UNSET, metadata=about("Format of the KV cache.", "FP8"))
    )


@attrs.frozen(kw_only=True)
class Mxfp4Document:
    """MXFP4 checkpoint with unquantized activations (quant_method `mxfp4`): gpt-oss."""

    KIND: ClassVar[str] = "mxfp4"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    )

    quant_method: Annotated[str, word("quant_method", ("mxfp4",))] = attrs.field(metadata=about("Always `mxfp4`."))
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized: names and globs.", ["lm_head"])
    )
    ignored_layers: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    exclude_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )


@register_quant_parser("mxfp8")
class Mxfp8Parser:
    """Reads `mxfp8` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, Mxfp8Document)
        experts = Pattern("moe_quant_algo", "$.moe_quant_algo", PatternKind.SLOT, target="moe")
        nvfp4 = layer(NVFP4, NVFP4.as_activation(dynamic=True), "mxfp8")
        cached = bool(found.kv_cache_quant_algo)
        return ParsedQuantConfig(
            quant_method="mxfp8",
            global_spec=layer(MXFP8, MXFP8.as_activation(dynamic=True), "mxfp8"),
            layer_pattern_specs=((experts, nvfp4),) if found.moe_quant_algo else (),
            exclude_layers=joined(document, {key: getattr(found, key) for key in EXCLUDE_KEYS}, Scope.RUN),
            kv_cache=FP8_STATIC if cached else None,
            tensor_names=("weight", "weight_scale_inv", *(("k_scale", "v_scale") if cached else ())),
        )


@register_quant_parser("mxfp4")
class Mxfp4Parser:
    """Reads `mxfp4` objects: weight-only, the activation is the engine's choice."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, Mxfp4Document)
        return ParsedQuantConfig(
            quant_method="mxfp4",
            global_spec=layer(MXFP4, None, "mxfp4"),
            exclude_layers=joined(document, {key: getattr(found, key) for key in EXCLUDE_KEYS}, Scope.RUN),
            tensor_names=("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
        )
