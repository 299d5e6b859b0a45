"""AMD Quark: global, per-layer and per-class formats, two-stage weights, and the KV cache among the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import attrs

from quant_spec.converter import structure
from quant_spec.dtypes import E8M0, ELEMENT_TYPES, FP4_E2M1, FP8_E4M3, FP32, UE8M0, ElementKind, ElementType
from quant_spec.errors import ConfigError, Defect, join_path
from quant_spec.globs import compile_glob
from quant_spec.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, PatternSpecs, register_quant_parser
from quant_spec.parsers.quark_documents import (
    DTYPES,
    SCALE_TYPES,
    UNQUANTIZED,
    LayerDocument,
    QuarkDocument,
    TensorSpec,
)
from quant_spec.parsers.reading import patterns
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.quant_key import NVFP4, QuantKey, ScaleDesc, mx_key
from quant_spec.rules import MOST_DEFECTS
from quant_spec.unset import UnsetType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

METHOD: Final = "quark"
_MX_GROUP: Final = 32
_NVFP4_GROUP: Final = 16
_STAGES: Final = 2
MAX_CACHE_GROUP: Final = 16
"""Patterns of `export.kv_cache_group`: each is compared with each entry. Real ones hold two."""
MAX_CACHE_CHARACTERS: Final = 1_024
"""Characters of those patterns together."""

Stages = TensorSpec | tuple[TensorSpec, ...] | UnsetType | None


@register_quant_parser(METHOD)
class QuarkParser:
    """Reads `quark` objects of all versions."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:  # noqa: ARG002  (protocol)
        """Return the parsed object; `facts` are not used."""
        return _Reader(structure(document, QuarkDocument)).read()


class _Reader:
    """Reads one structured document and collects what cannot be read."""

    def __init__(self, document: QuarkDocument) -> None:
        self.document = document
        self.defects: list[Defect] = []
        self.asymmetric = self.two_stage = self.static = False

    def read(self) -> ParsedQuantConfig:
        document = self.document
        self.check_cache_group()
        global_spec = self.layer(document.global_quant_config or None, "$.global_quant_config")
        layers = self.table(document.layer_quant_config or {}, "$.layer_quant_config", PatternKind.LITERAL)
        classes = self.table(document.layer_type_quant_config or {}, "$.layer_type_quant_config", PatternKind.CLASS)
        cache = self.cache()
        excluded = patterns(document.exclude, "$.exclude", Scope.SUBTREE)
        if self.defects:
            raise ConfigError(self.defects[:MOST_DEFECTS])
        return ParsedQuantConfig(
            quant_method=METHOD,
            global_spec=global_spec,
            layer_pattern_specs=layers,
            exclude_layers=excluded,
            class_specs=classes,
            kv_cache=cache,
            tensor_names=self.tensor_names(cache),
        )

    def table(self, entries: Mapping[str, LayerDocument | None], path: str, kind: PatternKind) -> PatternSpecs:
        found = []
        for text, entry in entries.items():
            at = join_path(path, text)
            if kind is PatternKind.CLASS:
                target = text.strip("<>'").rpartition(".")[2]
                pattern = Pattern(text, at, kind, target=target)
            else:
                pattern = Pattern.parse(text, at, Scope.SUBTREE)
            found.append(
                (pattern, self.layer(entry, at, cache=kind is PatternKind.LITERAL and self.in_cache_group(text)))
            )
        return tuple(found)

    def layer(self, entry: LayerDocument | None, path: str, *, cache: bool = False) -> LayerQuantConfig:
        if entry is None:
            return LayerQuantConfig(None, None, METHOD)
        if entry.output_tensors and not cache:
            problem = "output_tensors outside the KV cache group cannot be read"
            hint = "name the entry in export.kv_cache_group if it is the KV cache"
            self.defects.append(Defect(f"{path}.output_tensors", problem, "output_tensors", ("null",), hint))
        weight = self.stages(entry.weight, f"{path}.weight", activation=False)
        activation = self.stages(entry.input_tensors, f"{path}.input_tensors", activation=True)
        return LayerQuantConfig(weight, activation, METHOD)

    def stages(self, stages: Stages, path: str, *, activation: bool) -> QuantKey | None:
        """Return the key of one tensor, whose stages are one object, or a list of one or two."""
        try:
            if isinstance(stages, TensorSpec):
                return self.single(stages, path, activation=activation)
            if not stages:
                return None
            if len(stages) == 1:
                return self.single(stages[0], f"{path}[0]", activation=activation)
            return self.double(stages, path, activation=activation)
        except ConfigError as error:
            self.defects += error.defects
            return None

    def single(self, spec: TensorSpec, path: str, *, activation: bool) -> QuantKey | None:
        if spec.dtype in UNQUANTIZED:
            return None
        dynamic = _mode(spec, path, activation=activation)
        if spec.dtype == "mx":
            key = mx_key(ELEMENT_TYPES[DTYPES[str(spec.mx_element_dtype)]])
            return key if dynamic is None else key.as_activation(dynamic=dynamic)
        element = ELEMENT_TYPES[DTYPES[spec.dtype]]
        granularity = _granularity(spec, activation=activation)
        unsigned = element.kind is ElementKind.UNSIGNED
        symmetric = spec.symmetric is not False and not unsigned
        self.asymmetric |= not activation and not symmetric
        self.static |= dynamic is False
        return QuantKey(element, ScaleDesc(_scale_dtype(spec, granularity), granularity, dynamic), symmetric=symmetric)

    def double(self, stages: tuple[TensorSpec, ...], path: str, *, activation: bool) -> QuantKey:
        """Read the two pairs that exist: NVFP4 (the second stage quantizes the scales) and INT4 inside FP8."""
        first, second = stages[0], stages[1]
        summary = " then ".join(f"{each.dtype} {each.qscheme}" for each in stages)
        if len(stages) == _STAGES and _is_nvfp4(first, second):
            self.two_stage = True
            if not activation:
                return NVFP4
            self.static = True
            return NVFP4.as_activation(dynamic=first.is_dynamic is True)
        integers = {"int4", "uint4"}
        if len(stages) == _STAGES and not activation and first.dtype == "fp8_e4m3" and second.dtype in integers:
            self.two_stage = True
            key = self.single(second, f"{path}[1]", activation=False)
            if key is not None and first.qscheme == "per_tensor":
                return attrs.evolve(key, second_scale=ScaleDesc(_scale_type(first), PerTensor()))
        known = ("one object", "fp4 per_group 16 then fp8_e4m3 per_tensor", "fp8_e4m3 per_tensor then int4 per_channel")
        raise ConfigError(Defect(path, f"stages that are no known pair: {summary}", summary, known))

    def check_cache_group(self) -> None:
        """Refuse a group that would take long to compare with each entry.

        Raises:
            ConfigError: it has too many patterns, or too long ones.
        """
        group = self.cache_group()
        if len(group) > MAX_CACHE_GROUP or sum(map(len, group)) > MAX_CACHE_CHARACTERS:
            problem = f"kv_cache_group of {len(group)} patterns, {sum(map(len, group))} characters together"
            allowed = (f"<= {MAX_CACHE_GROUP} patterns", f"<= {MAX_CACHE_CHARACTERS} characters")
            raise ConfigError(Defect("$.export.kv_cache_group", problem, len(group), allowed))

    def in_cache_group(self, text: str) -> bool:
        return any(each == text or compile_glob(each).fullmatch(text) for each in self.cache_group())

    def cache_group(self) -> tuple[str, ...]:
        export = self.document.export
        group = export.kv_cache_group if export else None
        return tuple(each for each in group or () if each)

    def cache(self) -> QuantKey | None:
        """Return the KV cache's key: the outputs of the entries in the group, or of `kv_cache_quant_config`."""
        found: dict[str, QuantKey | None] = {}
        for path, entry in self.cache_entries():
            if entry is None or not entry.output_tensors:
                problem = "an entry of export.kv_cache_group has no output_tensors"
                self.defects.append(Defect(path, problem, None, ("output_tensors",)))
                continue
            found[path] = self.stages(entry.output_tensors, f"{path}.output_tensors", activation=True)
        keys = list(dict.fromkeys(found.values()))
        if len(keys) > 1:
            named = ", ".join(f"{path}: {key}" for path, key in found.items())
            problem = f"the entries of the KV cache differ ({named})"
            self.defects.append(Defect("$.export.kv_cache_group", problem, list(found), ("one format for all",)))
        return keys[0] if keys else None

    def cache_entries(self) -> Iterator[tuple[str, LayerDocument | None]]:
        entries = self.document.layer_quant_config or {}
        newer = self.document.kv_cache_quant_config or {}
        for index, each in enumerate(self.cache_group()):
            matching = [text for text in entries if each == text or compile_glob(each).fullmatch(text)]
            if not matching and not newer:
                path = f"$.export.kv_cache_group[{index}]"
                problem = f"kv_cache_group {each!r} names no entry of layer_quant_config"
                self.defects.append(Defect(path, problem, each, tuple(entries)))
            for text in matching:
                yield join_path("$.layer_quant_config", text), entries[text]
        for text, entry in newer.items():
            yield join_path("$.kv_cache_quant_config", text), entry

    def tensor_names(self, cache: QuantKey | None) -> tuple[str, ...]:
        names = ["weight", "weight_scale"]
        names += ["weight_scale_2"] if self.two_stage else []
        names += ["weight_zero_point"] if self.asymmetric else []
        names += ["input_scale"] if self.static else []
        names += ["output_scale"] if cache and not cache.is_dynamic else []
        return tuple(names)


def _mode(spec: TensorSpec, path: str, *, activation: bool) -> bool | None:
    """Return how the scales are made: None for a weight, else whether at run time."""
    dynamic = spec.is_dynamic is True
    if not activation and dynamic:
        problem = "a stored weight cannot have is_dynamic true"
        raise ConfigError(Defect(f"{path}.is_dynamic", problem, spec.is_dynamic, ("false",)))
    if activation and spec.qscheme == "per_channel" and not dynamic:
        problem = "per_channel on an activation is per token, whose scales are made at run time"
        raise ConfigError(Defect(f"{path}.is_dynamic", problem, spec.is_dynamic, ("true",)))
    return dynamic if activation else None


def _granularity(spec: TensorSpec, *, activation: bool) -> Granularity:
    if spec.qscheme == "per_group" and spec.group_size:
        return PerGroup(spec.group_size)
    if spec.qscheme == "per_block" and spec.block_size:
        return PerBlock(*spec.block_size)
    if spec.qscheme == "per_channel":
        return PerToken() if activation else PerChannel()
    return PerTensor()


def _scale_type(spec: TensorSpec) -> ElementType | None:
    name = SCALE_TYPES[spec.scale_type] if spec.scale_type else None
    return ELEMENT_TYPES[name] if name else None


def _scale_dtype(spec: TensorSpec, granularity: Granularity) -> ElementType | None:
    stored = _scale_type(spec)
    if spec.scale_format != "e8m0" or stored is E8M0:
        return stored
    mx = isinstance(granularity, PerGroup) and granularity.group_size == _MX_GROUP
    return E8M0 if mx else UE8M0


def _is_nvfp4(first: TensorSpec, second: TensorSpec) -> bool:
    elements = ELEMENT_TYPES.get(DTYPES.get(first.dtype, "")), ELEMENT_TYPES.get(DTYPES.get(second.dtype, ""))
    groups = first.qscheme == "per_group" and first.group_size == _NVFP4_GROUP and second.qscheme == "per_tensor"
    return elements == (FP4_E2M1, FP8_E4M3) and groups and _scale_type(second) in {FP32, None}
