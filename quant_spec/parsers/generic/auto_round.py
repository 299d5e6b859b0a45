"""`auto-round`: integers in groups or MX and NV floats, with `extra_config` by name or expression."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, INT8
from quant_spec.errors import ConfigError, Defect, join_path
from quant_spec.granularity import PerChannel, PerTensor, PerToken
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.reading import int_weight, joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4, QuantKey, ScaleDesc
from quant_spec.regexes import check_regex
from quant_spec.rules import Entries, Flag, OneOrEntries, Text, about, formatted, integer, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec.layer_config import LayerQuantConfig

METHOD: Final = "auto-round"
UNQUANTIZED_BITS: Final = (16, 32)
BITS: Final = integer(2, 3, 4, 8, *UNQUANTIZED_BITS)
GROUP: Final = integer(least=1, also=(-1, 0))
DATA_TYPES: Final = ("int", "fp", "float", "fp8", "fp8_e4m3", "mx_fp", "mx_fp4", "mx_fp8", "nv_fp", "nv_fp4")
_EXPRESSION: Final = frozenset("\\^$*+?{}[]|()")
_DEFAULT_GROUP: Final = 128
_FLOATS: Final[dict[tuple[str, int], QuantKey]] = {
    ("mx_fp", 4): MXFP4,
    ("mx_fp4", 4): MXFP4,
    ("mx_fp", 8): MXFP8,
    ("mx_fp8", 8): MXFP8,
    ("nv_fp", 4): NVFP4,
    ("nv_fp4", 4): NVFP4,
}
_FP8: Final = frozenset({"fp", "float", "fp8", "fp8_e4m3"})


def is_expression(key: str) -> bool:
    """Tell whether a key of `extra_config` is an expression: it holds a character that no name has."""
    return not _EXPRESSION.isdisjoint(key)


def _check_key(text: str) -> None:
    if not text:
        raise ConfigError(Defect("$", "empty name ''", text))
    if is_expression(text):
        check_regex(text)


EXTRA_KEY: Final = formatted("auto-round-name", _check_key)


@attrs.frozen(kw_only=True)
class LayerScheme:
    """What an `extra_config` entry changes; absent keys are the document's. 16 bits: left unquantized."""

    CLOSED: ClassVar[bool] = False

    bits: Annotated[int, BITS] | UnsetType | None = attrs.field(default=UNSET, metadata=about("Bits of a code.", 16))
    group_size: Annotated[int, GROUP] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale; -1: a whole row; 0: the tensor.", 128)
    )
    sym: Flag | UnsetType | None = attrs.field(default=UNSET, metadata=about("False: zero points."))
    data_type: Annotated[str, word("data_type", DATA_TYPES)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type.", "int")
    )
    act_bits: Annotated[int, integer(4, 8, *UNQUANTIZED_BITS)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Bits of the activation; 16 or absent: unquantized.", 16)
    )
    act_data_type: Annotated[str, word("act_data_type", DATA_TYPES)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type of the activation.", "int")
    )
    act_dynamic: Flag | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Scales of the activation are made at run time; absent: true.")
    )


@attrs.frozen(kw_only=True)
class AutoRoundDocument(LayerScheme):
    """AutoRound checkpoint (quant_method `auto-round`)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "extra_config": {"lm_head": {"bits": 16}},
        },
    )

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(metadata=about("Always `auto-round`."))
    bits: Annotated[int, BITS] = attrs.field(metadata=about("Bits of a code.", 4))
    extra_config: dict[Annotated[str, EXTRA_KEY], LayerScheme] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Overrides by module name or expression; 16 bits: left unquantized.", {"lm_head": {"bits": 16}}),
    )
    block_name_to_quantize: OneOrEntries | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Blocks that are quantized, as a list or joined by commas; what lies outside is left unquantized, unless "
            "`extra_config` names it.",
            "model.language_model.layers",
        ),
    )
    packing_format: Text | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("How codes are packed, which names the stored tensors.", "auto_round:auto_gptq"),
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized.", ["lm_head"])
    )


@register_quant_parser(METHOD)
class AutoRoundParser:
    """Reads `auto-round` objects."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, AutoRoundDocument)
        excluded: list[Pattern] = []
        layers: list[tuple[Pattern, LayerQuantConfig]] = []
        for text, entry in (found.extra_config or {}).items():
            path = join_path("$.extra_config", text)
            kind = PatternKind.REGEX if is_expression(text) else PatternKind.LITERAL
            pattern = Pattern(text, path, kind, Scope.RUN)
            spec = _layer(found, entry, path)
            if spec.weight is None:
                excluded.append(pattern)
            else:
                layers.append((pattern, spec))
        specs: PatternSpecs = tuple(layers)
        lists = joined(document, {"modules_to_not_convert": found.modules_to_not_convert}, Scope.RUN)
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=_layer(found, LayerScheme(), "$"),
            layer_pattern_specs=specs,
            exclude_layers=(*excluded, *lists),
            class_specs=_outside(found),
            tensor_names=_tensor_names(found),
        )


def _outside(document: AutoRoundDocument) -> PatternSpecs:
    """Return the entry that leaves unquantized what lies outside the quantized blocks; overrides come before it."""
    given = document.block_name_to_quantize or ()
    blocks = given.split(",") if isinstance(given, str) else given
    names = [re.escape(each.strip()) for each in blocks if each.strip()]
    if not names:
        return ()
    outside = f"(?!(?:{'|'.join(names)})(?:\\.|$))"
    path = "$.block_name_to_quantize"
    check_regex(outside, path)
    pattern = Pattern("block_name_to_quantize", path, PatternKind.REGEX, Scope.RUN, outside)
    return ((pattern, layer(None, None, METHOD)),)


def _layer(document: AutoRoundDocument, entry: LayerScheme, path: str) -> LayerQuantConfig:
    def value(name: str) -> object:
        own = getattr(entry, name)
        return own if own not in {UNSET, None} else getattr(document, name)

    bits = int(str(value("bits")))
    if bits in UNQUANTIZED_BITS:
        return layer(None, None, METHOD)
    group = value("group_size")
    size = group if isinstance(group, int) else _DEFAULT_GROUP
    kind = str(value("data_type") or "int")
    weight = _weight(kind, bits, size, value("sym") is not False, path)
    act_bits = value("act_bits")
    if not isinstance(act_bits, int) or act_bits in UNQUANTIZED_BITS:
        return layer(weight, None, METHOD)
    activation = _activation(str(value("act_data_type") or kind), act_bits, path)
    return layer(weight, activation.as_activation(dynamic=value("act_dynamic") is not False), METHOD)


def _weight(kind: str, bits: int, size: int, symmetric: bool, path: str) -> QuantKey:  # noqa: FBT001  (a document's key)
    if kind == "int":
        if size == 0:
            key = int_weight(bits, -1, symmetric=symmetric, path=path)
            return attrs.evolve(key, scale=ScaleDesc(None, PerTensor()))
        return int_weight(bits, size, symmetric=symmetric, path=path)
    if kind in _FP8 and bits == 8:  # noqa: PLR2004  (FP8)
        return QuantKey(FP8_E4M3, ScaleDesc(None, PerTensor() if size == 0 else PerChannel()))
    return _float(kind, bits, path)


def _activation(kind: str, bits: int, path: str) -> QuantKey:
    if kind == "int" and bits == 8:  # noqa: PLR2004  (INT8)
        return QuantKey(INT8, ScaleDesc(None, PerToken()))
    if kind in _FP8 and bits == 8:  # noqa: PLR2004  (FP8)
        return QuantKey(FP8_E4M3, ScaleDesc(None, PerToken()))
    return _float(kind, bits, path)


def _float(kind: str, bits: int, path: str) -> QuantKey:
    found = _FLOATS.get((kind, bits))
    if found is None:
        known = tuple(f"{name} with {width} bits" for name, width in _FLOATS)
        raise ConfigError(
            Defect(f"{path}.data_type", f"data_type {kind} with {bits} bits has no known reading", kind, known)
        )
    return found


def _tensor_names(document: AutoRoundDocument) -> tuple[str, ...]:
    kind = str(document.data_type or "int")
    if kind != "int":
        packed = "weight_packed" if document.bits == 4 else "weight"  # noqa: PLR2004  (two codes a byte)
        return (packed, "weight_scale", *(("weight_global_scale",) if kind.startswith("nv") else ()))
    if "gptq" in (document.packing_format or ""):
        return "qweight", "qzeros", "scales", "g_idx"
    return "qweight", "qzeros", "scales"
