"""`torchao`: a word, one config object, or a table of configs by module name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, FP8_E5M2, INT4, INT8, UINT4, ElementType
from quant_spec.errors import ConfigError, Defect, join_path
from quant_spec.granularity import PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.generic.torchao_documents import (
    METHOD,
    STRINGS,
    TABLES,
    ConfigData,
    ConfigNode,
    DtypeNode,
    TorchaoDocument,
)
from quant_spec.parsers.reading import joined, layer
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4, QuantKey, ScaleDesc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec.layer_config import LayerQuantConfig

_GROUPS: Final = {
    "Int4WeightOnlyConfig": 128,
    "Int8DynamicActivationInt4WeightConfig": 32,
    "Float8DynamicActivationInt4WeightConfig": 128,
}
"""Group size where the config does not say."""
_DEFAULT: Final = "_default"
_WEIGHT_SUFFIX: Final = ".weight"


@register_quant_parser(METHOD)
class TorchaoParser:
    """Reads `torchao` objects. A request cannot convert them: weights are stored as tensor subclasses."""

    convertible: ClassVar[bool] = False

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        found = structure(document, TorchaoDocument)
        lists = joined(document, {"modules_to_not_convert": found.modules_to_not_convert}, Scope.RUN)
        if isinstance(found.quant_type, str):
            settings = found.quant_type_kwargs
            data = ConfigData(group_size=settings.group_size) if settings else ConfigData()
            spec = _layer(STRINGS[found.quant_type], data, "$.quant_type")
            return ParsedQuantConfig(quant_method=METHOD, global_spec=spec, exclude_layers=lists)
        node = found.quant_type.default
        path = "$.quant_type.default"
        table = node.table
        if table is None:
            spec = _layer(node.type_, node.data, path)
            return ParsedQuantConfig(quant_method=METHOD, global_spec=spec, exclude_layers=lists)
        return _from_table(table, f"{path}._data.{TABLES[node.type_]}", lists)


def _from_table(table: Mapping[str, ConfigNode | None], path: str, lists: tuple[Pattern, ...]) -> ParsedQuantConfig:
    excluded: list[Pattern] = []
    layers: list[tuple[Pattern, LayerQuantConfig]] = []
    global_spec = layer(None, None, METHOD)
    for text, node in table.items():
        at = join_path(path, text)
        if node is not None and node.table is not None:
            raise ConfigError(Defect(at, "a table inside a table has no known reading", node.type_))
        spec = _layer(node.type_, node.data, at) if node is not None else None
        if text == _DEFAULT:
            global_spec = spec or global_spec
        elif spec is None:
            excluded.append(_pattern(text, at))
        else:
            layers.append((_pattern(text, at), spec))
    layers.sort(key=lambda pair: pair[0].kind is not PatternKind.LITERAL)
    specs: PatternSpecs = tuple(layers)
    return ParsedQuantConfig(METHOD, global_spec, specs, (*excluded, *lists))


def _pattern(text: str, path: str) -> Pattern:
    """Return the entry of a table's key; a parameter's name speaks of its module."""
    found = Pattern.parse(text, path, Scope.EXACT)
    return found.renamed(text.removesuffix(_WEIGHT_SUFFIX)) if found.kind is PatternKind.LITERAL else found


def _layer(name: str, data: ConfigData, path: str) -> LayerQuantConfig:
    """Return the formats of weight and activation that a config type means; scale dtypes are the tensors'."""
    weight, activation = _keys(name, data, path)
    return layer(weight, activation, METHOD)


def _keys(name: str, data: ConfigData, path: str) -> tuple[QuantKey, QuantKey | None]:
    group = ScaleDesc(None, PerGroup(data.group_size or _GROUPS.get(name, 1)))
    int8_token = QuantKey(INT8, ScaleDesc(None, PerToken(), dynamic=True))
    int8 = QuantKey(INT8, ScaleDesc(None, PerGroup(data.group_size) if data.group_size else PerChannel()))
    simple: dict[str, tuple[QuantKey, QuantKey | None]] = {
        "Int4WeightOnlyConfig": (QuantKey(UINT4, group, symmetric=False), None),
        "Int8WeightOnlyConfig": (int8, None),
        "Int8DynamicActivationInt8WeightConfig": (int8, int8_token),
        "Int8DynamicActivationInt4WeightConfig": (QuantKey(INT4, group), int8_token),
        "Float8DynamicActivationInt4WeightConfig": (QuantKey(INT4, group), _fp8(data, per_row=True, dynamic=True)),
        "Float8WeightOnlyConfig": (_fp8(data, per_row=True), None),
        "NVFP4DynamicActivationNVFP4WeightConfig": (NVFP4, NVFP4.as_activation(dynamic=True)),
        "NVFP4InferenceConfig": (NVFP4, NVFP4.as_activation(dynamic=True)),
        "NVFP4WeightOnlyConfig": (NVFP4, None),
    }
    if name in simple:
        return simple[name]
    if name.startswith("MX"):
        weight = MXFP4 if _dtype(data.weight_dtype).startswith("float4") else MXFP8
        activation = MXFP4 if _dtype(data.activation_dtype).startswith("float4") else MXFP8
        return weight, activation.as_activation(dynamic=True)
    rows = _rows(data, path)
    return _fp8(data, per_row=rows), _fp8(data, per_row=rows, dynamic=True)


def _rows(data: ConfigData, path: str) -> bool:
    """Tell whether scales are one a row (activation and weight alike) or one a tensor, torchao's default."""
    given = data.granularity
    nodes = given if isinstance(given, tuple) else (given,) if given else ()
    names = list(dict.fromkeys(node.type_ for node in nodes))
    if len(names) > 1:
        problem = f"granularities that differ have no known reading: {', '.join(names)}"
        raise ConfigError(Defect(f"{path}._data.granularity", problem, names, ("PerRow", "PerTensor")))
    return names == ["PerRow"]


def _fp8(data: ConfigData, *, per_row: bool, dynamic: bool | None = None) -> QuantKey:
    node = data.weight_dtype if dynamic is None else data.activation_dtype
    element: ElementType = FP8_E5M2 if _dtype(node) == "float8_e5m2" else FP8_E4M3
    row = PerChannel() if dynamic is None else PerToken()
    return QuantKey(element, ScaleDesc(None, row if per_row else PerTensor(), dynamic))


def _dtype(node: object) -> str:
    return node.data if isinstance(node, DtypeNode) else "float8_e4m3fn"
