"""`compressed-tensors`: groups of targets with their formats. Exact names first, then expressions, then classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from quant_spec.converter import structure
from quant_spec.dtypes import E8M0, ELEMENT_TYPES, FP4_E2M1, FP6_E2M3, FP8_E4M3, FP32, ElementType
from quant_spec.errors import join_path
from quant_spec.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.generic.ct_documents import (
    METHOD,
    SCALE_DTYPES,
    CacheArgs,
    CompressedTensorsDocument,
    InputArgs,
    QuantArgs,
    Scheme,
    WeightArgs,
)
from quant_spec.parsers.generic.ct_presets import PRESETS
from quant_spec.parsers.reading import layer, patterns
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import QuantKey, ScaleDesc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from quant_spec.layer_config import LayerQuantConfig

_FLOATS: Final[dict[int, ElementType]] = {4: FP4_E2M1, 6: FP6_E2M3, 8: FP8_E4M3}
_MX_FORMATS: Final = frozenset({"mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"})
_MX_GROUP: Final = 32
_PACKED: Final = frozenset({"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"})
_ORDER: Final = {PatternKind.LITERAL: 0, PatternKind.REGEX: 1, PatternKind.GLOB: 1, PatternKind.CLASS: 2}


@register_quant_parser(METHOD)
class CompressedTensorsParser:
    """Reads `compressed-tensors` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used.

        A class target is the file's global for its class, and a module that no target covers is unquantized: so the
        global spec asks for nothing and the classes stand in `class_specs`.
        """
        found = structure(document, CompressedTensorsDocument)
        schemes = list(_schemes(found))
        named = [pair for path, scheme, storage in schemes for pair in _targets(path, scheme, storage)]
        named.sort(key=lambda pair: _ORDER[pair[0].kind])
        layers: PatternSpecs = tuple(pair for pair in named if pair[0].kind is not PatternKind.CLASS)
        cache = found.kv_cache_scheme or None
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(None, None, METHOD),
            layer_pattern_specs=layers,
            exclude_layers=patterns(found.ignore, "$.ignore", Scope.EXACT, classes=True),
            class_specs=tuple(pair for pair in named if pair[0].kind is PatternKind.CLASS),
            kv_cache=activation_key(cache, None) if cache else None,
            tensor_names=_tensor_names(schemes, cache),
        )


def _schemes(document: CompressedTensorsDocument) -> Iterator[tuple[str, Scheme, str]]:
    """Yield each group with its JSON path and how it is stored; presets are written out."""
    for name, group in document.config_groups.items():
        path = join_path("$.config_groups", name)
        if isinstance(group, tuple):
            weights, inputs = PRESETS[name.upper()]
            plain = {"targets": list(group), "weights": weights, "input_activations": inputs}
            scheme = structure(plain, Scheme, path)
            yield path, scheme, _storage(scheme, document.format or "")
        else:
            yield f"{path}.targets", group, _storage(group, document.format or "")


def _storage(scheme: Scheme, whole: str) -> str:
    """Return how a group is stored: its own format, else the document's, else what its arguments imply."""
    if scheme.format:
        return scheme.format
    if whole and whole != "mixed-precision":
        return whole
    return _implied_storage(scheme.weights or None, scheme.input_activations or None)


def _implied_storage(weights: WeightArgs | None, inputs: InputArgs | None) -> str:
    if weights is None:
        return "dense"
    if weights.type != "float":
        return "int-quantized" if inputs else "pack-quantized"
    if weights.strategy == "tensor_group":
        return "nvfp4-pack-quantized"
    if _is_byte_scale(weights):
        return {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized"}.get(weights.num_bits or 8, "mxfp8-quantized")
    return "float-quantized"


def _targets(path: str, scheme: Scheme, storage: str) -> list[tuple[Pattern, LayerQuantConfig]]:
    weights, inputs = scheme.weights or None, scheme.input_activations or None
    spec = layer(
        weight_key(weights, storage) if weights else None, activation_key(inputs, storage) if inputs else None, METHOD
    )
    return [(pattern, spec) for pattern in patterns(scheme.targets, path, Scope.EXACT, classes=True)]


def weight_key(args: WeightArgs, storage: str) -> QuantKey:
    """Return the key of a group's weights."""
    return _key(args, storage, None)


def activation_key(args: InputArgs | CacheArgs, storage: str | None) -> QuantKey:
    """Return the key of a group's activations, or of the KV cache (no storage)."""
    return _key(args, storage, dynamic=args.dynamic is True or args.dynamic == "local")


def _key(args: QuantArgs, storage: str | None, dynamic: bool | None) -> QuantKey:  # noqa: FBT001  (a key's field)
    symmetric = args.symmetric is not False
    strategy = args.effective_strategy
    scale = ScaleDesc(_scale_dtype(args, storage), _granularity(args, strategy), dynamic)
    second = ScaleDesc(FP32, PerTensor()) if strategy == "tensor_group" else None
    return QuantKey(_element(args, symmetric=symmetric), scale, second, symmetric)


def _element(args: QuantArgs, *, symmetric: bool) -> ElementType:
    bits = args.num_bits or 8
    if args.type == "float":
        return _FLOATS[bits]
    unsigned = ELEMENT_TYPES.get(f"uint{bits}")
    if not symmetric and unsigned is not None and bits < 8:  # noqa: PLR2004  (INT8 codes stay signed)
        return unsigned
    return ELEMENT_TYPES[f"int{bits}"]


def _granularity(args: QuantArgs, strategy: str) -> Granularity:
    if strategy in {"group", "tensor_group"}:
        return PerGroup(args.group_size or 1)
    if strategy == "block" and args.block_structure:
        return PerBlock(*args.block_structure)
    if strategy == "channel":
        return PerChannel()
    return PerToken() if strategy == "token" else PerTensor()


def _is_byte_scale(args: QuantArgs) -> bool:
    return (args.scale_dtype or "").removeprefix("torch.") in {"uint8", "float8_e8m0fnu"}


def _scale_dtype(args: QuantArgs, storage: str | None) -> ElementType | None:
    """Return the dtype that the arguments give, else the one that the format fixes, else None: the tensor tells."""
    if args.scale_dtype:
        return ELEMENT_TYPES[SCALE_DTYPES[args.scale_dtype.removeprefix("torch.")]]
    if args.effective_strategy == "tensor_group":
        return FP8_E4M3
    grouped = args.type == "float" and args.effective_strategy == "group" and args.group_size == _MX_GROUP
    return E8M0 if grouped and storage in _MX_FORMATS else None


def _tensor_names(schemes: list[tuple[str, Scheme, str]], cache: CacheArgs | None) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for _, scheme, storage in schemes:
        weights, inputs = scheme.weights or None, scheme.input_activations or None
        if weights is None:
            continue
        names |= dict.fromkeys(("weight_packed" if storage in _PACKED else "weight", "weight_scale"))
        conditions = {
            "weight_shape": storage == "pack-quantized",
            "weight_zero_point": weights.symmetric is False,
            "weight_g_idx": weights.actorder in ("group", "dynamic", True),
            "weight_global_scale": storage == "nvfp4-pack-quantized",
            "input_global_scale": storage == "nvfp4-pack-quantized" and inputs is not None,
            "input_scale": inputs is not None and inputs.dynamic not in (True, "local"),
        }
        names |= dict.fromkeys(name for name, stored in conditions.items() if stored)
    if cache is not None and cache.dynamic is not True:
        names |= dict.fromkeys(("k_scale", "v_scale"))
    return tuple(names)
