"""AMD Quark's `quantization_config`: its document classes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import attrs

from quant_spec.errors import ConfigError, Defect
from quant_spec.rules import Anything, BlockShape, Entries, EntryKey, Flag, Schema, Size, about, integer, word
from quant_spec.unset import UNSET, UnsetType

UNQUANTIZED: Final = ("bfloat16", "float16", "float32")
DTYPES: Final[dict[str, str]] = {
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp6_e3m2": "fp6_e3m2",
    "fp6_e2m3": "fp6_e2m3",
    "fp4": "fp4_e2m1",
    "fp4_e2m1": "fp4_e2m1",
    "int8": "int8",
    "uint8": "uint8",
    "int4": "int4",
    "uint4": "uint4",
    "int3": "int3",
    "int2": "int2",
}
"""Quark's words of element types, and ours."""
MX_ELEMENTS: Final = ("fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4", "fp4_e2m1")
SCALE_TYPES: Final[dict[str, str | None]] = {
    "float": None,
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "pof2": "ue8m0",
    "float8_e8m0fnu": "e8m0",
    "float8_e5m3": "e5m3",
}
"""Containers of a scale; `float` is the model's dtype, which the config does not say."""

_QUANTIZED: Final = [*DTYPES, "mx"]


@attrs.frozen(kw_only=True)
class TensorSpec:
    """How one tensor is quantized."""

    CLOSED: ClassVar[bool] = False
    SCHEMA: ClassVar[Schema] = {
        "allOf": [
            {
                "if": {"properties": {"dtype": {"enum": _QUANTIZED}}, "required": ["dtype"]},
                "then": {"required": ["qscheme"], "properties": {"qscheme": {"type": "string"}}},
            },
            {
                "if": {"properties": {"qscheme": {"const": "per_group"}}, "required": ["qscheme"]},
                "then": {"required": ["group_size"], "properties": {"group_size": {"type": "integer"}}},
            },
            {
                "if": {"properties": {"qscheme": {"const": "per_block"}}, "required": ["qscheme"]},
                "then": {"required": ["block_size"], "properties": {"block_size": {"type": "array"}}},
            },
            {
                "if": {"properties": {"dtype": {"const": "mx"}}, "required": ["dtype"]},
                "then": {"required": ["mx_element_dtype"], "properties": {"mx_element_dtype": {"type": "string"}}},
            },
        ],
    }

    dtype: Annotated[str, word("dtype", [*DTYPES, *UNQUANTIZED, "mx"])] = attrs.field(
        metadata=about("Element type.", "fp8_e4m3", "fp4")
    )
    qscheme: (
        Annotated[str, word("qscheme", ["per_tensor", "per_channel", "per_group", "per_block"])] | UnsetType | None
    ) = attrs.field(default=UNSET, metadata=about("Elements that share a scale.", "per_channel"))
    ch_axis: Annotated[int, integer(-2, -1, 0, 1)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Axis of per_channel: 0 the rows of a weight; 1 or -1 the input side.", 0)
    )
    group_size: Size | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements in a group; needed by per_group.", 32)
    )
    block_size: BlockShape | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Rows and columns of a block; needed by per_block.", [128, 128])
    )
    is_dynamic: Flag | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Scales are made at run time (activations).")
    )
    symmetric: Flag | UnsetType | None = attrs.field(default=UNSET, metadata=about("False: zero points are stored."))
    scale_format: (
        Annotated[str, word("scale_format", ["e8m0", "float32", "float16", "bfloat16"])] | UnsetType | None
    ) = attrs.field(default=UNSET, metadata=about("`e8m0`: scales are powers of two in one byte.", "e8m0"))
    scale_type: Annotated[str, word("scale_type", SCALE_TYPES)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Container of the scale; `float` is the model's dtype.", "float")
    )
    mx_element_dtype: Annotated[str, word("mx_element_dtype", MX_ELEMENTS)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type of dtype `mx`.", "fp4")
    )

    def __attrs_post_init__(self) -> None:
        """Refuse a scheme without what it needs."""
        missing = []
        if self.dtype not in UNQUANTIZED and not self.qscheme:
            missing.append("qscheme")
        if self.qscheme == "per_group" and not self.group_size:
            missing.append("group_size")
        if self.qscheme == "per_block" and not self.block_size:
            missing.append("block_size")
        if self.dtype == "mx" and not self.mx_element_dtype:
            missing.append("mx_element_dtype")
        if missing:
            raise ConfigError([self._missing(name) for name in missing])

    def _missing(self, name: str) -> Defect:
        reason = f"dtype {self.dtype}" if name in {"qscheme", "mx_element_dtype"} else f"qscheme {self.qscheme}"
        return Defect(f"$.{name}", f"{name} is needed by {reason}", None)


@attrs.frozen(kw_only=True)
class LayerDocument:
    """What the tensors of a layer become; a list of two is quantized in two stages."""

    CLOSED: ClassVar[bool] = False

    weight: TensorSpec | tuple[TensorSpec, ...] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("The weight. Absent or null: unquantized.")
    )
    input_tensors: TensorSpec | tuple[TensorSpec, ...] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("The activation. Absent or null: unquantized.")
    )
    output_tensors: TensorSpec | tuple[TensorSpec, ...] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("The KV cache, in the entries that `export.kv_cache_group` selects; nowhere else."),
    )


@attrs.frozen(kw_only=True)
class ExportDocument:
    """How the checkpoint was written."""

    CLOSED: ClassVar[bool] = False

    kv_cache_group: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Globs of the entries whose outputs are the KV cache.", ["*k_proj", "*v_proj"])
    )
    pack_method: Annotated[str, word("pack_method", ["reorder", "order"])] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Order of the codes packed in one integer.", "reorder")
    )
    weight_format: Annotated[str, word("weight_format", ["real_quantized", "fake_quantized"])] | UnsetType | None = (
        attrs.field(default=UNSET, metadata=about("Whether codes or rounded values are stored.", "real_quantized"))
    )


@attrs.frozen(kw_only=True)
class QuarkDocument:
    """AMD Quark's quantization_config (quant_method `quark`)."""

    KIND: ClassVar[str] = "quark"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False},
                "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True},
            },
            "layer_quant_config": {},
            "exclude": ["lm_head"],
        },
    )

    quant_method: Annotated[str, word("quant_method", ("quark",))] = attrs.field(metadata=about("Always `quark`."))
    global_quant_config: LayerDocument | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Format of every layer that no other entry names; null or {}: unquantized.")
    )
    layer_quant_config: dict[EntryKey, LayerDocument | None] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Formats by module name, glob or `re:`; the first that fits wins.")
    )
    layer_type_quant_config: dict[EntryKey, LayerDocument | None] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Formats by module class, after the patterns.")
    )
    kv_cache_quant_config: dict[EntryKey, LayerDocument | None] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Entries whose outputs are the KV cache.")
    )
    exclude: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized: names, globs, `re:`.", ["lm_head", "re:.*\\.gate$"])
    )
    export: ExportDocument | UnsetType | None = attrs.field(default=UNSET, metadata=about("How it was written."))
    algo_config: Anything | UnsetType = attrs.field(
        default=UNSET, metadata=about("The algorithms that found the codes; says nothing of the storage.")
    )
