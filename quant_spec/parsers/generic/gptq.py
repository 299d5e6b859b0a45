"""`gptq`: integers in groups, with `dynamic` overrides and exclusions by expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.errors import join_path
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.reading import int_weight, joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.regexes import check_regex
from quant_spec.rules import Entries, Flag, about, formatted, integer, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec.quant_key import QuantKey

BITS: Final = integer(2, 3, 4, 8)
GROUP: Final = integer(least=1, also=(-1,))
FORMATS: Final = ("gptq", "gptq_v2", "marlin")
_DEFAULT_GROUP: Final = 128
EXCLUDE_PREFIX: Final = "-:"
INCLUDE_PREFIX: Final = "+:"


def expression_of(key: str) -> str:
    """Return the expression of a `dynamic` key, without `-:` or `+:`."""
    return key[2:] if key.startswith((EXCLUDE_PREFIX, INCLUDE_PREFIX)) else key


def _check_key(text: str) -> None:
    check_regex(expression_of(text))


DYNAMIC_KEY: Final = formatted("gptq-expression", _check_key)


@attrs.frozen(kw_only=True)
class Override:
    """What a `dynamic` entry changes; absent keys are the document's."""

    CLOSED: ClassVar[bool] = False

    bits: Annotated[int, BITS] | UnsetType = attrs.field(default=UNSET, metadata=about("Bits of a code.", 8))
    group_size: Annotated[int, GROUP] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale; -1: a whole row.", 64)
    )
    sym: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("False: zero points."))
    desc_act: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("Groups by activation order."))


@attrs.frozen(kw_only=True)
class GptqDocument:
    """GPTQ checkpoint (quant_method `gptq`)."""

    KIND: ClassVar[str] = "gptq"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    )

    quant_method: Annotated[str, word("quant_method", ("gptq",))] = attrs.field(metadata=about("Always `gptq`."))
    bits: Annotated[int, BITS] = attrs.field(metadata=about("Bits of a code.", 4))
    group_size: Annotated[int, GROUP] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale; -1: a whole row; absent: 128.", 128)
    )
    sym: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("False: zero points; absent: true."))
    desc_act: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("Groups by activation order."))
    dynamic: dict[Annotated[str, DYNAMIC_KEY], Override] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Overrides by expression, the first that fits: '-:EXPRESSION' excludes, '+:EXPRESSION' or the bare "
            "expression changes single keys.",
            {"-:.*\\.shared_expert\\..*": {}, "+:.*\\.18\\..*gate.*": {"bits": 8, "group_size": 64}},
        ),
    )
    checkpoint_format: Annotated[str, word("checkpoint_format", FORMATS)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Packing; `gptq_v2` stores zero points as they are.", "gptq")
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized.", ["lm_head"])
    )


@register_quant_parser("gptq")
class GptqParser:
    """Reads `gptq` objects."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, GptqDocument)
        excluded: list[Pattern] = []
        layers: list[tuple[Pattern, QuantKey]] = []
        for text, override in (found.dynamic or {}).items():
            path = join_path("$.dynamic", text)
            pattern = Pattern(text, path, PatternKind.REGEX, target=expression_of(text))
            if text.startswith(EXCLUDE_PREFIX):
                excluded.append(pattern)
            else:
                layers.append((pattern, _weight(found, override, path)))
        specs: PatternSpecs = tuple((pattern, layer(weight, None, "gptq")) for pattern, weight in layers)
        lists = joined(document, {"modules_to_not_convert": found.modules_to_not_convert}, Scope.RUN)
        return ParsedQuantConfig(
            quant_method="gptq",
            global_spec=layer(_weight(found, Override(), "$"), None, "gptq"),
            layer_pattern_specs=specs,
            exclude_layers=(*excluded, *lists),
            tensor_names=("qweight", "qzeros", "scales", "g_idx"),
        )


def _weight(document: GptqDocument, override: Override, path: str) -> QuantKey:
    group = override.group_size or document.group_size or _DEFAULT_GROUP
    sym = override.sym if override.sym is not UNSET else document.sym
    return int_weight(override.bits or document.bits, group, symmetric=sym is not False, path=path)
