"""`w4afp8` (SGLang): the word alone means block FP8 linears and INT4 experts with static FP8 activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, FP32, INT4
from quant_spec.granularity import PerBlock, PerGroup
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import EXCLUDE_KEYS, FP8_STATIC, joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.rules import Entries, about, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD: Final = "w4afp8"
_GROUP: Final = 128


@attrs.frozen(kw_only=True)
class W4afp8Document:
    """W4AFP8 checkpoint (quant_method `w4afp8`)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = ({"quant_method": "w4afp8"},)

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(metadata=about("Always `w4afp8`."))
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


@register_quant_parser(METHOD)
class W4afp8Parser:
    """Reads `w4afp8` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, W4afp8Document)
        weight = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerBlock(_GROUP, _GROUP)))
        activation = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerGroup(_GROUP), dynamic=True))
        experts = Pattern(METHOD, "$.quant_method", PatternKind.SLOT, target="moe")
        packed = QuantKey(INT4, ScaleDesc(None, PerGroup(_GROUP)))
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(weight, activation, METHOD),
            layer_pattern_specs=((experts, layer(packed, FP8_STATIC, METHOD)),),
            exclude_layers=joined(document, {key: getattr(found, key) for key in EXCLUDE_KEYS}, Scope.RUN),
            tensor_names=("weight", "weight_scale_inv", "input_scale"),
        )
