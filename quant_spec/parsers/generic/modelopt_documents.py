"""NVIDIA ModelOpt's quantization objects, flat (config.json) and nested (hf_quant_config.json): document classes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import attrs

from quant_spec.errors import ConfigError, Defect
from quant_spec.rules import Anything, Entries, EntryKey, Flag, Schema, Size, about, any_case_schema, integer, word
from quant_spec.unset import UNSET, UnsetType

METHOD: Final = "modelopt"
MIXED: Final = "MIXED_PRECISION"
GROUPS: Final[dict[str, int]] = {
    "NVFP4": 16,
    "NVFP4_AWQ": 16,
    "NVFP4_SVD": 16,
    "W4A16_NVFP4": 16,
    "W4A8_NVFP4_FP8": 16,
    "MXFP8": 32,
    "W4A8_MXFP4_FP8": 32,
    "FP8_PB_WO": 128,
}
"""Group size that a format fixes."""
ALGOS: Final = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    *GROUPS,
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
)
CACHE_ALGOS: Final = ("FP8", "INT8", "NVFP4")


def _group_rules() -> list[object]:
    """Return the schema of the group sizes that formats fix."""
    found: list[object] = []
    for size in sorted(set(GROUPS.values())):
        names = [name for name, each in GROUPS.items() if each == size]
        condition = {"required": ["quant_algo"], "properties": {"quant_algo": any_case_schema(names)}}
        found.append({"if": condition, "then": {"properties": {"group_size": {"enum": [size, None]}}}})
    return found


def _group_defects(algo: str, size: int | UnsetType | None) -> list[Defect]:
    fixed = GROUPS.get(algo)
    if fixed is None or not size or size == fixed:
        return []
    return [Defect("$.group_size", f"group_size {size} contradicts {algo}", size, (str(fixed),))]


@attrs.frozen(kw_only=True)
class QuantizedLayer:
    """One module of a mixed-precision checkpoint."""

    CLOSED: ClassVar[bool] = False
    SCHEMA: ClassVar[Schema] = {"allOf": _group_rules()}

    quant_algo: Annotated[str, word("quant_algo", ALGOS, any_case=True)] = attrs.field(
        metadata=about("Format of the module, in any case.", "NVFP4")
    )
    group_size: Size | UnsetType | None = attrs.field(default=UNSET, metadata=about("Elements that share a scale.", 16))

    def __attrs_post_init__(self) -> None:
        """Refuse a group that the format does not have."""
        defects = _group_defects(self.quant_algo, self.group_size)
        if defects:
            raise ConfigError(defects)


@attrs.frozen(kw_only=True)
class CacheScheme:
    """How the KV cache is quantized."""

    CLOSED: ClassVar[bool] = False
    SCHEMA: ClassVar[Schema] = {
        "not": {
            "required": ["num_bits"],
            "properties": {"num_bits": {"const": 4}},
            "anyOf": [{"properties": {"type": {"const": "int"}}}],
        },
    }

    num_bits: Annotated[int, integer(4, 8)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Bits of a code; absent: 8.", 8)
    )
    type: Annotated[str, word("type", ("int", "float"))] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Integers or floats; absent: int.", "float")
    )
    dynamic: Flag | UnsetType = attrs.field(
        default=UNSET, metadata=about("Scales are made at run time; absent: false.")
    )

    def __attrs_post_init__(self) -> None:
        """Refuse 4-bit integers."""
        if self.num_bits == 4 and self.type != "float":  # noqa: PLR2004  (bits)
            raise ConfigError(Defect("$.num_bits", "no known reading of a KV cache of 4-bit integers", 4, ("8",)))


@attrs.frozen(kw_only=True)
class ModelOptBody:
    """What both layouts hold."""

    CLOSED: ClassVar[bool] = False
    SCHEMA: ClassVar[Schema] = {
        "required": ["quant_algo"],
        "allOf": [
            *_group_rules(),
            {
                "if": {"required": ["quant_algo"], "properties": {"quant_algo": any_case_schema([MIXED])}},
                "then": {"required": ["quantized_layers"], "properties": {"quantized_layers": {"type": "object"}}},
            },
        ],
    }

    quant_algo: Annotated[str, word("quant_algo", (*ALGOS, MIXED), any_case=True)] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Format of the weights and activations, in any case.", "FP8", "NVFP4")
    )
    group_size: Size | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale; absent: by format.", 16)
    )
    kv_cache_quant_algo: Annotated[str, word("kv_cache_quant_algo", CACHE_ALGOS, any_case=True)] | UnsetType | None = (
        attrs.field(default=UNSET, metadata=about("Format of the KV cache.", "FP8"))
    )
    kv_cache_scheme: Annotated[str, word("kv_cache_scheme", ("static", "dynamic"))] | CacheScheme | UnsetType | None = (
        attrs.field(default=UNSET, metadata=about("Format of the KV cache: an object, or the word of an FP8 cache."))
    )
    exclude_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Modules left unquantized: names and globs; all such lists are joined.", ["lm_head"]),
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Modules left unquantized: names and globs; all such lists are joined.", ["lm_head"]),
    )
    quantized_layers: dict[EntryKey, QuantizedLayer] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Formats by module; needed by MIXED_PRECISION, which quantizes nothing else.",
            {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}},
        ),
    )
    config_groups: Anything | UnsetType = attrs.field(
        default=UNSET, metadata=about("The same in compressed-tensors' words; `quant_algo` decides.")
    )

    def __attrs_post_init__(self) -> None:
        """Refuse a missing or contradictory format."""
        defects = self.body_defects()
        if defects:
            raise ConfigError(defects)

    def body_defects(self) -> list[Defect]:
        """Return what is wrong between the keys."""
        if self.quant_algo is UNSET:
            return [Defect("$.quant_algo", "missing key 'quant_algo'", None, (*ALGOS, MIXED))]
        if self.quant_algo == MIXED and not isinstance(self.quantized_layers, dict):
            return [Defect("$.quantized_layers", f"missing key 'quantized_layers', which {MIXED} needs", None)]
        return _group_defects(self.quant_algo, self.group_size)


@attrs.frozen(kw_only=True)
class ModelOptDocument(ModelOptBody):
    """NVIDIA ModelOpt checkpoint (quant_method `modelopt`, or the nested layout of hf_quant_config.json)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    )
    SCHEMA: ClassVar[Schema] = {
        "if": {"required": ["quantization"]},
        "then": {"not": {"required": ["quant_algo"]}},
        "else": ModelOptBody.SCHEMA,
    }

    quant_method: Annotated[str, word("quant_method", (METHOD,))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("`modelopt`; absent in the nested layout.")
    )
    quantization: ModelOptBody | UnsetType = attrs.field(default=UNSET, metadata=about("The nested layout's object."))

    def body_defects(self) -> list[Defect]:
        """Return what is wrong between the keys of the layout that is used."""
        if not isinstance(self.quantization, ModelOptBody):
            return super().body_defects()
        if self.quant_algo is UNSET:
            return []
        problem = "quant_algo beside quantization: the flat and the nested layout in one object"
        return [Defect("$.quant_algo", problem, self.quant_algo, ("one of the two",))]

    @property
    def body(self) -> ModelOptBody:
        """The object that says how weights are quantized."""
        return self.quantization if isinstance(self.quantization, ModelOptBody) else self
