"""The `quantization_config` of a written checkpoint, in AMD Quark's shape, so that engines load it as an offline one.

One global format, an entry for every format that differs from it, and the exact names of all modules that stay
unquantized. What is written is read back: every module must resolve to the format that its tensors have.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.written import StoredModule, check_document
from quant_spec import PlanError
from quant_spec.dtypes import E8M0
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.report import layer_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from quant_spec import QuantKey
    from quant_spec.layer_config import LayerQuantConfig

QUARK_VERSION: Final = "0.13"
"""Version of the layout that is written."""

_ELEMENT_WORDS: Final = {"fp4_e2m1": "fp4"}
_GLOB_CHARACTERS: Final = frozenset("*?[")


def quark_config(
    modules: Sequence[StoredModule],
    *,
    wanted: LayerQuantConfig | None = None,
    entries: Iterable[str] = (),
    scale_roundings: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the `quantization_config` that describes `modules`.

    Args:
        modules: every module that an engine may ask about.
        wanted: the operator's global format; it becomes the document's if any module has it, else the commonest does.
        entries: globs to try first for modules that differ from the global format, such as the operator's own.
        scale_roundings: weight key's word -> how its power-of-two scales were rounded.

    Raises:
        PlanError: no such document can describe them, or a format has no word in it.
    """
    quantized = [module for module in modules if module.config.is_quantized]
    rounded = scale_roundings or {}
    counts = Counter(module.config for module in quantized)
    most = wanted if wanted is not None and wanted in counts else counts.most_common(1)[0][0]
    others = [module for module in quantized if module.config != most]
    globs = dict(_entries(others, modules, entries))
    document = _document(
        _layer(most, rounded),
        {name: _layer(config, rounded) for name, config in globs.items()},
        _excluded(modules),
    )
    check_document(document, modules)
    return document


def _entries(
    others: Sequence[StoredModule], modules: Sequence[StoredModule], given: Iterable[str]
) -> list[tuple[str, LayerQuantConfig]]:
    """Return globs, else names, that give each of `others` its format and no other module another."""
    remaining = {module.name: module.config for module in others}
    quantized = {module.name: module.config for module in modules if module.config.is_quantized}
    containers = {module.name: module.container for module in modules}
    # `*.mlp.experts*` speaks of the container that an engine asks about and of the experts that the file holds.
    made = dict.fromkeys(
        f"*.{layer_type(containers[name])}*" if containers[name] else f"*.{layer_type(name)}" for name in remaining
    )
    found: list[tuple[str, LayerQuantConfig]] = []
    for glob in dict.fromkeys((*given, *made)):
        if _GLOB_CHARACTERS.isdisjoint(glob):
            continue
        matches = re.compile(translate(glob)).match
        fitting = [name for name in remaining if matches(name)]
        configs = {remaining[name] for name in fitting}
        strangers = (name for name, config in quantized.items() if config not in configs and matches(name))
        if len(configs) == 1 and next(strangers, None) is None:
            found.append((glob, configs.pop()))
            for name in fitting:
                del remaining[name]
    return [*found, *remaining.items()]


def _excluded(modules: Sequence[StoredModule]) -> list[str]:
    """Return the exact names of unquantized modules, a container in front of its experts."""
    kept = [module for module in modules if not module.config.is_quantized]
    return list(dict.fromkeys(name for module in kept for name in (module.container, module.name) if name))


def _document(
    global_config: dict[str, object], layers: dict[str, dict[str, object]], exclude: list[str]
) -> dict[str, object]:
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": QUARK_VERSION,
        "global_quant_config": global_config,
        "layer_quant_config": layers,
        "layer_type_quant_config": {},
        "exclude": exclude,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "algo_config": None,
        "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def _layer(config: LayerQuantConfig, rounded: Mapping[str, str]) -> dict[str, object]:
    weight, activation = config.weight_key, config.activation_key
    if weight is None:
        message = f"{config}: a layer entry needs a weight format"
        raise PlanError(message)
    return {
        "weight": tensor_spec(weight, rounded.get(str(weight))),
        "input_tensors": None if activation is None else tensor_spec(activation),
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }


def tensor_spec(key: QuantKey, scale_rounding: str | None = None) -> dict[str, object] | list[dict[str, object]]:
    """Return Quark's description of a tensor's format; a list of two stages for formats with a second scale.

    Args:
        key: a weight's or an activation's key.
        scale_rounding: how power-of-two scales were rounded; None: `even`.

    Raises:
        PlanError: Quark has no word for the format.
    """
    granularity = key.scale.granularity
    is_mx = key.scale.dtype == E8M0
    dynamic = key.is_dynamic
    spec: dict[str, object] = {
        "dtype": _ELEMENT_WORDS.get(key.element.name, key.element.name),
        "qscheme": _scheme(key),
        "is_dynamic": dynamic,
        "ch_axis": _channel_axis(key),
        "group_size": granularity.group_size if isinstance(granularity, PerGroup) else None,
        "block_size": [granularity.rows, granularity.cols] if isinstance(granularity, PerBlock) else None,
        "symmetric": None if is_mx or key.second_scale is not None else key.symmetric,
        "round_method": "half_even",
        "scale_type": "float32" if isinstance(granularity, PerBlock) else "float",
        "scale_format": "e8m0" if is_mx else None,
        "scale_calculation_mode": (scale_rounding or "even") if is_mx else None,
        "observer_cls": _observer(key),
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }
    if key.second_scale is None:
        return spec
    stage = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "group_size": None}
    return [
        {**spec, "scale_type": "float32", "observer_cls": None},
        {**spec, **stage, "scale_type": "float32", "observer_cls": None, "is_scale_quant": True},
    ]


def _scheme(key: QuantKey) -> str:
    granularity = key.scale.granularity
    schemes = {
        PerTensor: "per_tensor",
        PerChannel: "per_channel",
        PerToken: "per_channel",
        PerGroup: "per_group",
        PerBlock: "per_block",
    }
    found = schemes.get(type(granularity))
    if found is None:
        message = (
            f"{key}: Quark's config has no word for {granularity}; it has {', '.join(sorted(set(schemes.values())))}"
        )
        raise PlanError(message)
    return found


def _channel_axis(key: QuantKey) -> int | None:
    """Return the axis along which scales differ; 1 marks the rows of an activation, which are tokens."""
    granularity = key.scale.granularity
    axes: dict[type, int] = {PerChannel: 0, PerToken: 1, PerGroup: -1}
    return axes.get(type(granularity))


def _observer(key: QuantKey) -> str:
    if key.scale.dtype == E8M0:
        return "PerBlockMXObserver"
    names: dict[type, str] = {
        PerTensor: "PerTensorMinMaxObserver",
        PerChannel: "PerChannelMinMaxObserver",
        PerToken: "PerChannelMinMaxObserver",
        PerGroup: "PerGroupMinMaxObserver",
        PerBlock: "PerBlock2DMinMaxObserver",
    }
    return names[type(key.scale.granularity)]
