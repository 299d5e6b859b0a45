"""`bitsandbytes`: NF4 or FP4 codebooks in blocks of 64, or LLM.int8(); a load flag alone counts as this method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import FP4_BNB, FP32, INT8, NF4, UINT8
from quant_spec.errors import ConfigError, Defect
from quant_spec.granularity import PerChannel, PerGroup, PerSuperBlock, PerToken
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import joined, layer
from quant_spec.patterns import Scope
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.rules import Entries, Flag, Schema, about, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD: Final = "bitsandbytes"
QUANT_TYPES: Final = {"fp4": FP4_BNB, "nf4": NF4}
BLOCK: Final = 64
"""Consecutive values of the flattened weight that share a scale."""
SUPER_BLOCK: Final = 256
"""First-level scales that share a second-level scale (double quantization)."""
_FLAGS: Final = ("load_in_4bit", "load_in_8bit")
_TRUE: Final[dict[str, object]] = {"const": True}


def _only(flag: str) -> Schema:
    other = _FLAGS[flag == _FLAGS[0]]
    return {"required": [flag], "properties": {flag: _TRUE}, "not": {"required": [other], "properties": {other: _TRUE}}}


@attrs.frozen(kw_only=True)
class BitsAndBytesDocument:
    """bitsandbytes checkpoint (quant_method `bitsandbytes`, or only a load flag)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    )
    SCHEMA: ClassVar[Schema] = {"anyOf": [_only(flag) for flag in _FLAGS]}

    quant_method: Annotated[str, word("quant_method", (METHOD,))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("`bitsandbytes`, or absent beside a load flag.")
    )
    load_in_4bit: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("4-bit codes of a codebook."))
    load_in_8bit: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("8-bit integers."))
    bnb_4bit_quant_type: Annotated[str, word("bnb_4bit_quant_type", QUANT_TYPES)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Codebook of 4 bits; absent: fp4.", "nf4")
    )
    bnb_4bit_use_double_quant: Flag | UnsetType = attrs.field(
        default=UNSET, metadata=about("Scales are quantized to 8 bits themselves.")
    )
    llm_int8_skip_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized, for 4 bits too.", ["lm_head"])
    )

    def __attrs_post_init__(self) -> None:
        """Refuse both load flags, and neither."""
        on = [flag for flag in _FLAGS if getattr(self, flag) is True]
        if len(on) != 1:
            problem = f"{' and '.join(on)} cannot both be true" if on else f"one of {' and '.join(_FLAGS)} must be true"
            raise ConfigError(Defect(f"$.{_FLAGS[1]}", problem, on, _FLAGS))


@register_quant_parser(METHOD)
class BitsAndBytesParser:
    """Reads `bitsandbytes` objects."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, BitsAndBytesDocument)
        lists = {"llm_int8_skip_modules": found.llm_int8_skip_modules}
        weight, activation, names = _four_bits(found) if found.load_in_4bit else _eight_bits()
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(weight, activation, METHOD),
            exclude_layers=joined(document, lists, Scope.RUN),
            tensor_names=names,
        )


def _four_bits(document: BitsAndBytesDocument) -> tuple[QuantKey, None, tuple[str, ...]]:
    word = document.bnb_4bit_quant_type or "fp4"
    double = document.bnb_4bit_use_double_quant is True
    second = ScaleDesc(FP32, PerSuperBlock(SUPER_BLOCK)) if double else None
    weight = QuantKey(QUANT_TYPES[word], ScaleDesc(UINT8 if double else FP32, PerGroup(BLOCK)), second)
    nested = ("weight.nested_absmax",) if double else ()
    names = ("weight", "weight.absmax", "weight.quant_map", *nested, f"weight.quant_state.bitsandbytes__{word}")
    return weight, None, names


def _eight_bits() -> tuple[QuantKey, QuantKey, tuple[str, ...]]:
    weight = QuantKey(INT8, ScaleDesc(FP32, PerChannel()))
    return weight, QuantKey(INT8, ScaleDesc(FP32, PerToken(), dynamic=True)), ("weight", "SCB")
