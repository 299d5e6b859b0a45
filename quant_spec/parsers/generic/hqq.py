"""`hqq`: asymmetric integers in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import attrs

from quant_spec.converter import structure
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import int_weight, joined, layer
from quant_spec.patterns import Scope
from quant_spec.rules import Entries, Size, about, integer, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class WeightParameters:
    """How weights are quantized."""

    CLOSED: ClassVar[bool] = False

    nbits: Annotated[int, integer(2, 3, 4, 8)] = attrs.field(metadata=about("Bits of a code.", 4))
    group_size: Size = attrs.field(metadata=about("Elements that share a scale and a zero point.", 64))
    axis: Annotated[int, integer(1)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Groups run along the input side (1); other axes have no known reading.", 1)
    )


@attrs.frozen(kw_only=True)
class LayerParameters:
    """How a layer is quantized."""

    CLOSED: ClassVar[bool] = False

    weight_quant_params: WeightParameters = attrs.field(metadata=about("How weights are quantized."))


@attrs.frozen(kw_only=True)
class HqqDocument:
    """HQQ checkpoint (quant_method `hqq`)."""

    KIND: ClassVar[str] = "hqq"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
            "skip_modules": ["lm_head"],
        },
    )

    quant_method: Annotated[str, word("quant_method", ("hqq",))] = attrs.field(metadata=about("Always `hqq`."))
    quant_config: LayerParameters = attrs.field(metadata=about("How layers are quantized."))
    skip_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; absent: lm_head.", ["lm_head"])
    )


@register_quant_parser("hqq")
class HqqParser:
    """Reads `hqq` objects."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, HqqDocument)
        given = found.quant_config.weight_quant_params
        weight = int_weight(given.nbits, given.group_size, symmetric=False, path="$.quant_config.weight_quant_params")
        skipped = ("lm_head",) if found.skip_modules is UNSET else found.skip_modules
        listed = document if "skip_modules" in document else {"skip_modules": None}
        return ParsedQuantConfig(
            quant_method="hqq",
            global_spec=layer(weight, None, "hqq"),
            exclude_layers=joined(listed, {"skip_modules": skipped}, Scope.RUN),
            tensor_names=("W_q", "scale", "zero"),
        )
