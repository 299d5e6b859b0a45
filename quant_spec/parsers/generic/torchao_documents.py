"""torchao's `quantization_config`: its document classes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import attrs

from quant_spec.errors import ConfigError, Defect
from quant_spec.rules import Entries, EntryKey, Schema, Size, about, word
from quant_spec.unset import UNSET, UnsetType

METHOD: Final = "torchao"
STRINGS: Final[dict[str, str]] = {
    "int4_weight_only": "Int4WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int4_weight": "Int8DynamicActivationInt4WeightConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
}
"""Older words, and the config types that they name."""
TABLES: Final[dict[str, str]] = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}
"""Config types that are tables by module name, and the key of the table."""
TYPES: Final = (
    *STRINGS.values(),
    "Float8DynamicActivationInt4WeightConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXFPInferenceConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4InferenceConfig",
    "NVFP4WeightOnlyConfig",
    *TABLES,
)
DTYPES: Final = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")


@attrs.frozen(kw_only=True)
class DtypeNode:
    """A torch dtype."""

    CLOSED: ClassVar[bool] = False

    type_: Annotated[str, word("_type", ("torch.dtype",))] = attrs.field(
        metadata=about("Always `torch.dtype`.", key="_type")
    )
    data: Annotated[str, word("dtype", DTYPES)] = attrs.field(
        metadata=about("The dtype.", "float8_e4m3fn", key="_data")
    )


@attrs.frozen(kw_only=True)
class GranularityNode:
    """Elements that share a scale."""

    CLOSED: ClassVar[bool] = False

    type_: Annotated[str, word("_type", ("PerRow", "PerTensor"))] = attrs.field(
        metadata=about("The granularity.", "PerRow", key="_type")
    )


@attrs.frozen(kw_only=True)
class ConfigData:
    """Settings of a config; what is absent has torchao's default."""

    CLOSED: ClassVar[bool] = False

    group_size: Size | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale.", 128)
    )
    granularity: GranularityNode | tuple[GranularityNode, ...] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Of activation and weight, or one for both.")
    )
    weight_dtype: DtypeNode | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type of the weight.")
    )
    activation_dtype: DtypeNode | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type of the activation.")
    )
    fqn_to_config: dict[EntryKey, ConfigNode | None] | UnsetType = attrs.field(
        default=UNSET,
        metadata=about("Configs by module name or `re:`; null: left unquantized; `_default`: the others."),
    )
    module_fqn_to_config: dict[EntryKey, ConfigNode | None] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Older name of `fqn_to_config`.")
    )


def _needs_table(name: str, key: str) -> Schema:
    data = {"required": ["_data"], "properties": {"_data": {"required": [key]}}}
    return {"if": {"required": ["_type"], "properties": {"_type": {"const": name}}}, "then": data}


@attrs.frozen(kw_only=True)
class ConfigNode:
    """A config as torchao writes it: its type, version and settings."""

    CLOSED: ClassVar[bool] = False
    SCHEMA: ClassVar[Schema] = {"allOf": [_needs_table(name, key) for name, key in TABLES.items()]}

    type_: Annotated[str, word("_type", TYPES)] = attrs.field(
        metadata=about("Name of the config class.", "Int4WeightOnlyConfig", key="_type")
    )
    data: ConfigData = attrs.field(metadata=about("Settings of the config.", {}, key="_data"))

    def __attrs_post_init__(self) -> None:
        """Refuse a table without its table."""
        key = TABLES.get(self.type_)
        if key and getattr(self.data, key) is UNSET:
            raise ConfigError(Defect(f"$._data.{key}", f"missing key {key!r}, which {self.type_} needs", None))

    @property
    def table(self) -> dict[str, ConfigNode | None] | None:
        """The table by module name, or None for a single config."""
        key = TABLES.get(self.type_)
        found: dict[str, ConfigNode | None] | None = getattr(self.data, key) if key else None
        return found


@attrs.frozen(kw_only=True)
class QuantTypeDocument:
    """Exactly one config, under `default`."""

    CLOSED: ClassVar[bool] = True

    default: ConfigNode = attrs.field(metadata=about("The config."))


@attrs.frozen(kw_only=True)
class StringSettings:
    """Settings of a config that is named by a word."""

    CLOSED: ClassVar[bool] = False

    group_size: Size | UnsetType | None = attrs.field(default=UNSET, metadata=about("Elements that share a scale.", 64))


@attrs.frozen(kw_only=True)
class TorchaoDocument:
    """torchao checkpoint (quant_method `torchao`)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 64}},
    )

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(metadata=about("Always `torchao`."))
    quant_type: Annotated[str, word("quant_type", STRINGS)] | QuantTypeDocument = attrs.field(
        metadata=about("A word, or an object with one config under `default`.", "int4_weight_only")
    )
    quant_type_kwargs: StringSettings | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Settings beside a word.", {"group_size": 64})
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized.", ["lm_head"])
    )
