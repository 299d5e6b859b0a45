"""`fp8`: per tensor or in blocks, static or dynamic; DeepSeek-V4's experts and NVFP4 manifests inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, FP32, UE8M0, ElementType
from quant_spec.errors import ConfigError, Defect, join_path, shown
from quant_spec.granularity import PerBlock, PerGroup, PerTensor
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.reading import EXCLUDE_KEYS, FP8_DYNAMIC, FP8_STATIC, joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import MXFP4, NVFP4, QuantKey, ScaleDesc
from quant_spec.rules import BlockShape, Entries, EntryKey, Schema, about, integer, word
from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD: Final = "fp8"
SCHEME: Final = word("activation_scheme", ("dynamic", "static"))
CACHE_SCHEME: Final = word("kv_cache_scheme", ("dynamic", "static"))
FMT: Final = word("fmt", ("e4m3", "float8_e4m3fn"))
SCALE_FMT: Final = word("scale_fmt", ("ue8m0",))
MANIFEST_ALGO: Final = word("quant_algo", ("NVFP4",), any_case=True)
EXPERT_DTYPE: Final = word("expert_dtype", ("fp4", "fp8"))
NVFP4_NAMES: Final = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_V4: Final = "deepseek_v4"


@attrs.frozen(kw_only=True)
class ManifestEntry:
    """One module of an NVFP4 manifest."""

    CLOSED: ClassVar[bool] = False

    quant_algo: Annotated[str, MANIFEST_ALGO] = attrs.field(metadata=about("Format of the module.", "NVFP4"))
    group_size: Annotated[int, integer(16)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements that share a scale.", 16)
    )


@attrs.frozen(kw_only=True)
class Fp8Document:
    """FP8 checkpoint (quant_method `fp8`): DeepSeek, Qwen, MiniMax, Mistral and others."""

    KIND: ClassVar[str] = "fp8"
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    SCHEMA: ClassVar[Schema] = {
        "not": {
            "required": ["activation_scheme", "weight_block_size"],
            "properties": {"activation_scheme": {"const": "static"}, "weight_block_size": {"type": "array"}},
        },
    }

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(metadata=about("Always `fp8`."))
    fmt: Annotated[str, FMT] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Element type; absent: e4m3.", "e4m3")
    )
    activation_scheme: Annotated[str, SCHEME] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Scales of activations: made at run time (dynamic, the default) or stored (static).", "dynamic"),
    )
    weight_block_size: BlockShape | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Rows and columns that share a scale; absent or null: one scale a tensor.", [128, 128]),
    )
    scale_fmt: Annotated[str, SCALE_FMT] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Announces scales that are powers of two.", "ue8m0")
    )
    kv_cache_scheme: Annotated[str, CACHE_SCHEME] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Scales of an FP8 KV cache.", "static")
    )
    ignored_layers: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    modules_to_not_convert: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Modules left unquantized; beside an NVFP4 manifest: modules left in FP8.", ["lm_head"]),
    )
    exclude_modules: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized; all such lists are joined.", ["lm_head"])
    )
    moe_quant_algo: Annotated[str, MANIFEST_ALGO] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Format of the routed experts where it is not FP8.", "NVFP4")
    )
    quantized_layers: dict[EntryKey, ManifestEntry] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about(
            "Manifest of the modules that are not FP8.", {"layers.3.ffn.experts.0.w1": {"quant_algo": "NVFP4"}}
        ),
    )
    expert_dtype: Annotated[str, EXPERT_DTYPE] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Format of the routed experts; usually beside this object in config.json.", "fp4")
    )

    def __attrs_post_init__(self) -> None:
        """Refuse static activations in blocks: one stored scale cannot serve groups."""
        if self.weight_block_size and self.activation_scheme == "static":
            problem = (
                "activation_scheme 'static' cannot go with weight_block_size: scales of groups are made at run time"
            )
            raise ConfigError(Defect("$.activation_scheme", problem, "static", ("dynamic",)))

    @property
    def has_manifest(self) -> bool:
        """True if the experts are NVFP4 inside this FP8 checkpoint."""
        return bool(self.moe_quant_algo or self.quantized_layers)


def fp8_keys(document: Fp8Document) -> tuple[QuantKey, QuantKey]:
    """Return the keys of weight and activation of an FP8 layer."""
    dtype: ElementType = UE8M0 if document.scale_fmt else FP32
    if document.weight_block_size:
        rows, cols = document.weight_block_size
        weight = QuantKey(FP8_E4M3, ScaleDesc(dtype, PerBlock(rows, cols)))
        return weight, QuantKey(FP8_E4M3, ScaleDesc(dtype, PerGroup(cols), dynamic=True))
    static = document.activation_scheme == "static"
    weight = QuantKey(FP8_E4M3, ScaleDesc(dtype, PerTensor()))
    return weight, weight.as_activation(dynamic=not static)


@register_quant_parser(METHOD)
class Fp8Parser:
    """Reads `fp8` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:
        """Return the parsed object; `facts` give the format of DeepSeek-V4's experts and the name of its scales."""
        found = structure(document, Fp8Document)
        weight, activation = fp8_keys(found)
        lists = {key: getattr(found, key) for key in EXCLUDE_KEYS if not (key == "ignore" and found.has_manifest)}
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(weight, activation, METHOD),
            layer_pattern_specs=_experts(found, facts),
            exclude_layers=joined(document, lists, Scope.RUN),
            kv_cache={"static": FP8_STATIC, "dynamic": FP8_DYNAMIC}.get(str(found.kv_cache_scheme)),
            tensor_names=_tensor_names(found, facts),
        )


def _experts(document: Fp8Document, facts: ModelFacts) -> PatternSpecs:
    nvfp4 = layer(NVFP4, NVFP4.as_activation(dynamic=True), METHOD)
    if document.quantized_layers:
        path = "$.quantized_layers"
        return tuple(
            (Pattern.parse(text, join_path(path, text), Scope.RUN), nvfp4) for text in document.quantized_layers
        )
    if document.moe_quant_algo:
        return ((_slot("moe_quant_algo", "$.moe_quant_algo"), nvfp4),)
    inside = document.expert_dtype or None
    beside = facts.expert_dtype or ("fp4" if facts.model_type == _V4 else None)
    if beside not in {None, "fp4", "fp8"}:
        problem = f"unknown expert_dtype {shown(beside)} in {facts.config_file}"
        raise ConfigError(Defect("$.expert_dtype", problem, beside, ("fp4", "fp8")))
    if (inside or beside) != "fp4":
        return ()
    path = "$.expert_dtype" if inside else f"{facts.config_file}: $.expert_dtype"
    return ((_slot("expert_dtype", path), LayerQuantConfig(MXFP4, None, METHOD)),)


def _slot(text: str, path: str) -> Pattern:
    """Return the entry that covers all routed experts and prints as the key that says so."""
    return Pattern(text, path, PatternKind.SLOT, target="moe")


def _tensor_names(document: Fp8Document, facts: ModelFacts) -> tuple[str, ...]:
    names: tuple[str, ...]
    if document.has_manifest:
        names = NVFP4_NAMES
    elif facts.model_type == _V4:
        names = ("weight", "scale")
    elif document.weight_block_size:
        names = ("weight", "weight_scale_inv")
    else:
        names = ("weight", "weight_scale", *(("input_scale",) if document.activation_scheme == "static" else ()))
    return (*names, *(("k_scale", "v_scale") if document.kv_cache_scheme == "static" else ()))
