"""`gptq`: integers in groups, with `dynamic` overrides and exclusions by expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.errors import ConfigError, join_path, wrong_type
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.reading import int_weight, joined, layer, patterns
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.regexes import check_regex
from quant_spec.rules import (
    ONE_OR_ENTRIES,
    Entries,
    Flag,
    Rule,
    about,
    check_entries,
    each_checked,
    formatted,
    integer,
    word,
)
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec.quant_key import QuantKey

BITS: Final = integer(2, 3, 4, 8)
GROUP: Final = integer(least=1, also=(-1,))
FORMATS: Final = ("gptq", "gptq_v2", "marlin")
_DEFAULT_GROUP: Final = 128
HEAD: Final = "lm_head"
EXCLUDE_PREFIX: Final = "-:"
INCLUDE_PREFIX: Final = "+:"


def expression_of(key: str) -> str:
    """Return the expression of a `dynamic` key, without `-:` or `+:`."""
    return key[2:] if key.startswith((EXCLUDE_PREFIX, INCLUDE_PREFIX)) else key


def _check_key(text: str) -> None:
    check_regex(expression_of(text))


DYNAMIC_KEY: Final = formatted("gptq-expression", _check_key)


def _whitelist(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(wrong_type("$", value, "list"))
    members = each_checked(value, ONE_OR_ENTRIES.check)
    return tuple(name for each in members for name in ((each,) if isinstance(each, str) else check_entries(each)))


WHITELIST: Final = Rule("list", _whitelist, lambda: {"type": "array", "items": ONE_OR_ENTRIES.schema()})


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
    modules_in_block_to_quantize: Annotated[tuple[str, ...], WHITELIST] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "The modules of a block that are quantized, all others are not; names, or lists of names.",
            [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]],
        ),
    )
    lm_head: Flag | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("False: the output head is left unquantized, unless `dynamic` names it.")
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
        base, unquantized = layer(_weight(found, Override(), "$"), None, "gptq"), layer(None, None, "gptq")
        whitelist = patterns(found.modules_in_block_to_quantize, "$.modules_in_block_to_quantize", Scope.RUN)
        head = (Pattern(HEAD, "$.lm_head", PatternKind.LITERAL, Scope.RUN),) if found.lm_head is False else ()
        lists = joined(document, {"modules_to_not_convert": found.modules_to_not_convert}, Scope.RUN)
        return ParsedQuantConfig(
            quant_method="gptq",
            global_spec=unquantized if whitelist else base,
            layer_pattern_specs=specs,
            exclude_layers=(*excluded, *lists),
            class_specs=(*((each, unquantized) for each in head), *((each, base) for each in whitelist)),
            tensor_names=("qweight", "qzeros", "scales", "g_idx"),
        )


def _weight(document: GptqDocument, override: Override, path: str) -> QuantKey:
    group = override.group_size or document.group_size or _DEFAULT_GROUP
    sym = override.sym if override.sym is not UNSET else document.sym
    return int_weight(override.bits or document.bits, group, symmetric=sym is not False, path=path)
