"""`modelopt`: one format by name, or MIXED_PRECISION by module; both file layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, FP32, INT4, INT8
from quant_spec.errors import join_path
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.generic.modelopt_documents import (
    METHOD,
    MIXED,
    CacheScheme,
    ModelOptBody,
    ModelOptDocument,
)
from quant_spec.parsers.reading import EXCLUDE_KEYS, FP8_DYNAMIC, FP8_PER_TOKEN, FP8_STATIC, joined, layer
from quant_spec.patterns import Pattern, Scope
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4, QuantKey, ScaleDesc

if TYPE_CHECKING:
    from quant_spec.layer_config import LayerQuantConfig

_TENSOR: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor()))
_CHANNEL: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerChannel()))
_BLOCK: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerBlock(128, 128)))
_INT8: Final = QuantKey(INT8, ScaleDesc(None, PerChannel()))
_INT8_STATIC: Final = QuantKey(INT8, ScaleDesc(None, PerTensor(), dynamic=False))
_NVFP4_INPUT: Final = NVFP4.as_activation(dynamic=True)
_INT4_GROUP: Final = 128

KEYS: Final[dict[str, tuple[QuantKey, QuantKey | None]]] = {
    "FP8": (_TENSOR, FP8_STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": (_CHANNEL, FP8_PER_TOKEN),
    "FP8_PB_WO": (_BLOCK, None),
    "NVFP4": (NVFP4, _NVFP4_INPUT),
    "NVFP4_AWQ": (NVFP4, _NVFP4_INPUT),
    "NVFP4_SVD": (NVFP4, _NVFP4_INPUT),
    "W4A16_NVFP4": (NVFP4, None),
    "W4A8_NVFP4_FP8": (NVFP4, FP8_STATIC),
    "MXFP8": (MXFP8, MXFP8.as_activation(dynamic=True)),
    "W4A8_MXFP4_FP8": (MXFP4, FP8_STATIC),
    "W8A16": (_INT8, None),
    "W8A8_SQ_PER_CHANNEL": (_INT8, _INT8_STATIC),
}
"""Format -> keys of weight and activation; AWQ's depend on the group size."""

_SECOND_SCALE: Final = frozenset({"NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8"})
_PRE_SCALED: Final = frozenset({"NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ"})
_CACHES: Final = {
    "FP8": FP8_STATIC,
    "INT8": QuantKey(INT8, ScaleDesc(FP32, PerTensor(), dynamic=False)),
    "NVFP4": NVFP4.as_activation(dynamic=False),
}


@register_quant_parser(METHOD)
class ModelOptParser:
    """Reads `modelopt` objects."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, ModelOptDocument)
        body = found.body
        root = "$" if body is found else "$.quantization"
        algos = _algos(body)
        excluded = _excluded(found, document, "$")
        nested = document.get("quantization")
        if isinstance(nested, Mapping):
            excluded += _excluded(body, nested, root)
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=layer(None, None, METHOD)
            if body.quant_algo == MIXED
            else _layer(str(body.quant_algo), body.group_size),
            layer_pattern_specs=_layers(body, join_path(root, "quantized_layers")),
            exclude_layers=excluded,
            kv_cache=_cache(body),
            tensor_names=_tensor_names(algos, body),
        )


def _excluded(body: ModelOptBody, document: Mapping[str, object], root: str) -> tuple[Pattern, ...]:
    lists = {key: getattr(body, key) for key in EXCLUDE_KEYS if hasattr(body, key)}
    return joined(document, lists, Scope.SUBTREE, root)


def _algos(body: ModelOptBody) -> list[str]:
    if body.quant_algo != MIXED:
        return [str(body.quant_algo)]
    return list(dict.fromkeys(each.quant_algo for each in (body.quantized_layers or {}).values()))


def _layer(algo: str, group_size: object) -> LayerQuantConfig:
    """Return the formats of weight and activation that a `quant_algo` means."""
    if algo in KEYS:
        return layer(*KEYS[algo], METHOD)
    group = group_size if isinstance(group_size, int) else _INT4_GROUP
    weight = QuantKey(INT4, ScaleDesc(None, PerGroup(group)))
    return layer(weight, FP8_STATIC if algo == "W4A8_AWQ" else None, METHOD)


def _layers(body: ModelOptBody, path: str) -> PatternSpecs:
    return tuple(
        (Pattern.parse(text, join_path(path, text), Scope.SUBTREE), _layer(each.quant_algo, each.group_size))
        for text, each in (body.quantized_layers or {}).items()
    )


def _cache(body: ModelOptBody) -> QuantKey | None:
    if body.kv_cache_quant_algo:
        return _CACHES[body.kv_cache_quant_algo]
    scheme = body.kv_cache_scheme
    if isinstance(scheme, str):
        return FP8_STATIC if scheme == "static" else FP8_DYNAMIC
    if not isinstance(scheme, CacheScheme):
        return None
    name = "INT8" if scheme.type != "float" else "NVFP4" if scheme.num_bits == 4 else "FP8"  # noqa: PLR2004  (bits)
    return _CACHES[name].as_activation(dynamic=scheme.dynamic is True)


def _tensor_names(algos: Iterable[str], body: ModelOptBody) -> tuple[str, ...]:
    names = dict.fromkeys(("weight", "weight_scale"))
    for algo in algos:
        activation = _layer(algo, None).activation_key
        conditions = {
            "weight_scale_2": algo in _SECOND_SCALE,
            "pre_quant_scale": algo in _PRE_SCALED,
            "input_scale": activation is not None
            and (activation.second_scale is not None or not activation.is_dynamic),
        }
        names |= dict.fromkeys(name for name, stored in conditions.items() if stored)
    if body.kv_cache_quant_algo:
        names |= dict.fromkeys(("k_scale", "v_scale"))
    return tuple(names)
