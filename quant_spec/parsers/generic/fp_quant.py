"""`fp_quant`: MXFP4 or NVFP4 of rotated weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, register_quant_parser
from quant_spec.parsers.reading import layer, patterns
from quant_spec.patterns import Scope
from quant_spec.quant_key import MXFP4, NVFP4
from quant_spec.rules import Entries, Size, about, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD: Final = "fp_quant"
KEYS: Final = {"mxfp4": MXFP4, "nvfp4": NVFP4}


@attrs.frozen(kw_only=True)
class FpQuantDocument:
    """FP-Quant checkpoint (quant_method `fp_quant`): weights are stored rotated by a Hadamard matrix."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = ({"quant_method": "fp_quant", "forward_dtype": "mxfp4"},)

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(metadata=about("Always `fp_quant`."))
    forward_dtype: Annotated[str, word("forward_dtype", KEYS)] = attrs.field(
        metadata=about("Format of weights and activations.", "mxfp4")
    )
    hadamard_group_size: Size | UnsetType = attrs.field(
        default=UNSET, metadata=about("Size of the rotation; absent: the group of the format.", 32)
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; absent or null: lm_head.", ["lm_head"])
    )


@register_quant_parser(METHOD)
class FpQuantParser:
    """Reads `fp_quant` objects. A request cannot convert them: the rotation would have to be undone."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, FpQuantDocument)
        key = KEYS[found.forward_dtype]
        listed = found.modules_to_not_convert
        excluded = ("lm_head",) if listed is None or listed is UNSET else listed
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(key, key.as_activation(dynamic=True), METHOD),
            exclude_layers=patterns(excluded, "$.modules_to_not_convert", Scope.RUN),
            tensor_names=("qweight", "scales", *(("weight_global_scale",) if key is NVFP4 else ())),
        )
