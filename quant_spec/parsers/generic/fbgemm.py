"""`fbgemm_fp8`: per-channel weights, per-token activations capped by a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, FP32
from quant_spec.granularity import PerChannel
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import FP8_PER_TOKEN, joined, layer
from quant_spec.patterns import Scope
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.rules import POSITIVE_NUMBER, Entries, about, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class FbgemmDocument:
    """FBGEMM FP8 checkpoint (quant_method `fbgemm_fp8`)."""

    KIND: ClassVar[str] = "fbgemm_fp8"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    )

    quant_method: Annotated[str, word("quant_method", ("fbgemm_fp8",))] = attrs.field(
        metadata=about("Always `fbgemm_fp8`.")
    )
    activation_scale_ub: Annotated[float, POSITIVE_NUMBER] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Upper bound of an activation's scale times 448; absent: 1200.", 1200.0)
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized.", ["lm_head"])
    )


@register_quant_parser("fbgemm_fp8")
class FbgemmParser:
    """Reads `fbgemm_fp8` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, FbgemmDocument)
        weight = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerChannel()))
        lists = {"modules_to_not_convert": found.modules_to_not_convert}
        return ParsedQuantConfig(
            quant_method="fbgemm_fp8",
            global_spec=layer(weight, FP8_PER_TOKEN, "fbgemm_fp8"),
            exclude_layers=joined(document, lists, Scope.RUN),
            tensor_names=("weight", "weight_scale"),
        )
