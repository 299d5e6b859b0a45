"""`awq`: 4-bit integers in groups, packed along the output side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.errors import ConfigError, Defect
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import int_weight, joined, layer
from quant_spec.patterns import Scope
from quant_spec.rules import Entries, Flag, Schema, about, integer, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSIONS: Final = ("gemm", "gemv", "gemv_fast", "exllama", "ipex", "marlin", "llm-awq")
GROUP: Final = integer(least=1, also=(-1,))
_DEFAULT_GROUP: Final = 128
_BITS: Final = ("bits", "w_bit")


@attrs.frozen(kw_only=True)
class AwqDocument:
    """AWQ checkpoint (quant_method `awq`)."""

    KIND: ClassVar[str] = "awq"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    )
    SCHEMA: ClassVar[Schema] = {"anyOf": [{"required": [key]} for key in _BITS]}

    quant_method: Annotated[str, word("quant_method", ("awq",))] = attrs.field(metadata=about("Always `awq`."))
    bits: Annotated[int, integer(4)] | UnsetType = attrs.field(default=UNSET, metadata=about("Bits of a code.", 4))
    w_bit: Annotated[int, integer(4)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Older name of `bits`.", 4)
    )
    group_size: Annotated[int, GROUP] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale; -1: a whole row; absent: 128.", 128)
    )
    q_group_size: Annotated[int, GROUP] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Older name of `group_size`.", 128)
    )
    zero_point: Flag | UnsetType = attrs.field(default=UNSET, metadata=about("Zero points are stored; absent: true."))
    version: Annotated[str, word("version", VERSIONS, any_case=True)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Packing.", "gemm")
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized.", ["visual"])
    )

    def __attrs_post_init__(self) -> None:
        """Refuse an object that does not say how many bits."""
        if self.bits is UNSET and self.w_bit is UNSET:
            raise ConfigError(Defect("$.bits", "missing key 'bits'", None, _BITS))


@register_quant_parser("awq")
class AwqParser:
    """Reads `awq` objects."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, AwqDocument)
        group = found.group_size or found.q_group_size or _DEFAULT_GROUP
        symmetric = found.zero_point is False
        weight = int_weight(found.bits or found.w_bit or 4, group, symmetric=symmetric)
        lists = {"modules_to_not_convert": found.modules_to_not_convert}
        return ParsedQuantConfig(
            quant_method="awq",
            global_spec=layer(weight, None, "awq"),
            exclude_layers=joined(document, lists, Scope.RUN),
            tensor_names=("qweight", "scales") if symmetric else ("qweight", "qzeros", "scales"),
        )
