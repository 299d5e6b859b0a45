"""digest: SHA-256 over canonical JSON of everything that can change an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from quant_spec.unset import UNSET, UnsetType

if TYPE_CHECKING:
    from quant_spec.config import QuantizationConfig
    from quant_spec.layer_config import LayerQuantConfig
    from quant_spec.patterns import Pattern
    from quant_spec.quant_key import QuantKey, ScaleDesc

Canonical: TypeAlias = "str | int | bool | list[Canonical] | dict[str, Canonical] | None"

SCHEMA_VERSION = 1
"""Raised when the same config comes to mean something else."""


def _scale(scale: ScaleDesc | None) -> Canonical:
    if scale is None:
        return None
    return [str(scale.dtype), str(scale.granularity), scale.dynamic]


def _key(key: QuantKey | UnsetType | None) -> Canonical:
    if key is None or key is UNSET:
        return repr(key)
    return [key.element.name, _scale(key.scale), _scale(key.second_scale), key.symmetric]


def _spec(spec: LayerQuantConfig) -> Canonical:
    return [_key(spec.weight), _key(spec.activation), spec.quant_method]


def _entry(entry: Pattern) -> Canonical:
    return [entry.kind.value, entry.scope.value, entry.target]


def canonical(config: QuantizationConfig) -> Canonical:
    """Return what decides the answers of a config as plain JSON values."""
    names = config.names
    excludes = {(entry.kind.value, entry.scope.value, entry.target) for entry in config.exclude_layers if entry.target}
    return {
        "version": SCHEMA_VERSION,
        "quant_method": config.quant_method,
        "global": _spec(config.global_spec),
        "patterns": [[_entry(entry), _spec(spec)] for entry, spec in config.layer_pattern_specs],
        "excludes": [[*each] for each in sorted(excludes)],
        "classes": [[_entry(entry), _spec(spec)] for entry, spec in config.class_specs],
        "kv_cache": _key(config.kv_cache),
        "source_dtype": config.source_dtype,
        "name_mapping": [[old, new] for old, new in names.name_mapping],
        "packed_modules_mapping": [[fused, [*shards]] for fused, shards in sorted(names.packed_modules_mapping)],
        "num_experts": names.num_experts,
        "expert_leaves": [*names.expert_leaves],
        "tensors": None if names.tensors is None else [*sorted(names.tensors)],
        "source": None if config.source is None else canonical(config.source),
    }


def digest_of(config: QuantizationConfig) -> str:
    """Return the SHA-256 of `canonical(config)` as 64 hexadecimal digits."""
    import hashlib  # noqa: PLC0415  (5 ms of start-up, for compile caches only)
    import json  # noqa: PLC0415  (likewise)

    text = json.dumps(canonical(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
