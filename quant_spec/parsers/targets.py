"""vLLM's request: the slots `linear` and `moe`, or `targets` by pattern, with `ignore`; and its shorthand words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeAlias

import attrs

from quant_spec.converter import structure
from quant_spec.errors import ConfigError, Defect, join_path, unknown
from quant_spec.formats import QuantFormat, formats
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.reading import patterns
from quant_spec.parsers.vllm_words import ACTIVATION, SLOT_LINEAR, SLOT_MOE, TARGET, WEIGHT
from quant_spec.patterns import Pattern, Scope
from quant_spec.rules import Entries, EntryKey, Schema, about
from quant_spec.unset import UNSET, UnsetType
from quant_spec.vllm_names import activation_key, weight_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec.quant_key import QuantKey

METHOD: Final = "online"
READ_THE_OBJECT: Final = "online"
"""The shorthand that names no format: the object beside it does."""


@attrs.frozen(kw_only=True)
class LayerSpec:
    """What one slot or target becomes. At least one key must be present; absent and null are two answers."""

    CLOSED: ClassVar[bool] = True
    SCHEMA: ClassVar[Schema] = {
        "minProperties": 1,
        "not": {
            "required": ["weight", "activation"],
            "properties": {"weight": {"type": "null"}, "activation": {"type": "string"}},
        },
    }

    weight: Annotated[str, WEIGHT] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Format of the weight. Null: left alone. Absent: the shorthand's, else the checkpoint's.", "mxfp4"
        ),
    )
    activation: Annotated[str, ACTIVATION] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Format of the activation. Null: unquantized. Absent: the default of the weight's format.", "mxfp8"
        ),
    )

    def __attrs_post_init__(self) -> None:
        """Refuse an empty object, and an activation without a weight."""
        if self.weight is UNSET and self.activation is UNSET:
            raise ConfigError(Defect("$", "empty object: it asks for nothing", {}, ("weight", "activation")))
        if self.weight is None and isinstance(self.activation, str):
            problem = f"activation {self.activation!r} of a weight that is left alone (weight null)"
            raise ConfigError(Defect("$.activation", problem, self.activation, ("null",)))


@attrs.frozen(kw_only=True)
class TargetsDocument:
    """Online quantization request in vLLM's shape: by layer kind (`linear`, `moe`) or by pattern (`targets`)."""

    KIND: ClassVar[str] = "targets"
    CLOSED: ClassVar[bool] = True
    SCHEMA: ClassVar[Schema] = {
        "not": {"required": ["targets"], "anyOf": [{"required": ["linear"]}, {"required": ["moe"]}]},
    }
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"linear": "fp8_per_block", "moe": {"weight": "mxfp4", "activation": None}, "ignore": ["lm_head"]},
        {"targets": {"*self_attn*": {"weight": "mxfp4", "activation": "mxfp8"}, "*experts*": "mxfp4"}},
    )

    linear: Annotated[str, SLOT_LINEAR] | LayerSpec | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Linear layers: a shorthand, a weight format or an object. Null: left alone.", "fp8_per_block"),
    )
    moe: Annotated[str, SLOT_MOE] | LayerSpec | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Fused experts: a shorthand, a weight format or an object. Null: left alone.", "mxfp4"),
    )
    targets: dict[EntryKey, Annotated[str, TARGET] | LayerSpec] | UnsetType = attrs.field(
        default=UNSET,
        metadata=about(
            "Formats by pattern: a module name, a glob, or 're:' and a regular expression. The first that fits wins.",
            {"*experts*": {"weight": "mxfp4", "activation": None}},
        ),
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules that stay as the checkpoint has them.", ["lm_head", "re:.*mlp\\.gate$"])
    )

    def __attrs_post_init__(self) -> None:
        """Refuse `targets` beside a slot."""
        slots = [name for name in ("linear", "moe") if getattr(self, name) is not UNSET]
        if slots and self.targets is not UNSET:
            problem = f"targets cannot stand beside {' and '.join(slots)}"
            raise ConfigError(Defect("$.targets", problem, None, ("targets", "linear / moe")))


Given: TypeAlias = str | LayerSpec | UnsetType | None


def shorthand_format(word: str, path: str) -> QuantFormat:
    """Return the format of a shorthand word.

    Raises:
        ConfigError: no format has that shorthand; lists them and the nearest.
    """
    by_word = {name: each for each in formats() for name in each.shorthands}
    by_word |= {each.name: each for each in formats() if not each.shorthands}
    found = by_word.get(word.strip().lower())
    if found is None:
        raise ConfigError(unknown(path, "shorthand", word, (*sorted(by_word), READ_THE_OBJECT)))
    return found


def _spec(given: Given, base: QuantFormat | None, path: str) -> LayerQuantConfig:
    """Return what a slot or target asks for; `base` is the shorthand's format for this kind of layer."""
    spec = LayerSpec(weight=given) if given is None or isinstance(given, str) else given
    if isinstance(spec, LayerSpec):
        weight = base.weight if spec.weight is UNSET and base else _weight(spec.weight, path)
        activation = _activation(spec.activation, path) if weight is not None else None
        return LayerQuantConfig(weight, activation, METHOD)
    if base is None:
        return LayerQuantConfig()
    return LayerQuantConfig(base.weight, UNSET, METHOD)


def _weight(word: str | UnsetType | None, path: str) -> QuantKey | UnsetType | None:
    return weight_key(word, path) if isinstance(word, str) else word


def _activation(word: str | UnsetType | None, path: str) -> QuantKey | UnsetType | None:
    return activation_key(word, path) if isinstance(word, str) else word


def parse_targets(request: Mapping[str, object], shorthand: str | None = None) -> ParsedQuantConfig:
    """Return vLLM's request, with its shorthand word if one was given.

    A slot or target beats the shorthand field by field: an absent weight is the shorthand's.

    Raises:
        ConfigError: with every defect of the object, or an unknown shorthand.
    """
    document = structure(request, TargetsDocument)
    word = None if shorthand is None or shorthand.strip().lower() == READ_THE_OBJECT else shorthand
    base = shorthand_format(word, "$ (shorthand)") if word else None
    linear_base = base if base and "linear" in base.slots else None
    moe_base = base if base and "moe" in base.slots else None
    targets = document.targets or {}
    layers: PatternSpecs = tuple(
        (Pattern.parse(text, path), _spec(given, base, path))
        for text, given in targets.items()
        for path in (join_path("$.targets", text),)
    )
    linear = _spec(document.linear, linear_base, "$.linear")
    experts = _spec(document.moe, moe_base, "$.moe")
    moe = Pattern.slot("moe", "$.moe" if document.moe is not UNSET else "$ (shorthand)")
    named = document.moe is not UNSET or (moe_base is not None and linear_base is None)
    asked = any(each.weight is not None or each.activation for each in (linear, experts, *(spec for _, spec in layers)))
    return ParsedQuantConfig(
        quant_method=METHOD if asked else None,
        global_spec=linear,
        layer_pattern_specs=(*layers, *(((moe, experts),) if named else ())),
        exclude_layers=patterns(document.ignore, "$.ignore", Scope.SUBTREE),
        class_specs=() if named or experts == linear else ((moe, experts),),
    )


@register_quant_parser("targets")
class TargetsParser:
    """Reads vLLM's request without a shorthand."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed request; `facts` are not used."""
        return parse_targets(document)
