"""The `quantization_config` of a written checkpoint in compressed-tensors' shape.

One group for every pair of formats; the commonest has the class target `Linear`, each other one expressions that fit
its own modules alone, else their names. All modules that stay unquantized are listed in `ignore`. What is written is
read back: every module must resolve to the formats that its tensors have.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.written import StoredModule, check_document
from quant_spec import PlanError
from quant_spec.dtypes import E8M0, FP4_E2M1, FP8_E4M3, INT8
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.report import layer_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant_spec import QuantKey
    from quant_spec.layer_config import LayerQuantConfig

CT_VERSION: Final = "0.20.0"
"""Version of compressed-tensors whose layout is written."""
LINEAR: Final = "Linear"
MIXED: Final = "mixed-precision"
_TYPES: Final = {FP8_E4M3: "float", FP4_E2M1: "float", INT8: "int"}
_STRATEGIES: Final[dict[type, str]] = {
    PerTensor: "tensor",
    PerChannel: "channel",
    PerToken: "token",
    PerGroup: "group",
    PerBlock: "block",
}


def ct_config(modules: Sequence[StoredModule], *, wanted: LayerQuantConfig | None = None) -> dict[str, object]:
    """Return the `quantization_config` that describes `modules`.

    Args:
        modules: every module that an engine may ask about.
        wanted: the operator's global format; its group gets the class target if any module has it, else the commonest.

    Raises:
        PlanError: no such document can describe them, or a format has no words in it.
    """
    quantized = [module for module in modules if module.config.is_quantized]
    counts = Counter(module.config for module in quantized)
    most = wanted if wanted is not None and wanted in counts else counts.most_common(1)[0][0]
    groups = {config: _targets(config, quantized) for config in counts if config != most}
    # The class last: readers that stop at the first target that fits would call the others unused.
    groups[most] = [LINEAR]
    made = {f"group_{at}": _group(config, targets) for at, (config, targets) in enumerate(groups.items())}
    formats = list(dict.fromkeys(str(group["format"]) for group in made.values()))
    document: dict[str, object] = {
        "quant_method": "compressed-tensors",
        "version": CT_VERSION,
        "quantization_status": "compressed",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "config_groups": made,
        "ignore": _ignored(modules),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    check_document(document, modules)
    return document


def _targets(config: LayerQuantConfig, quantized: Sequence[StoredModule]) -> list[str]:
    """Return expressions, else names, that fit all quantized modules with a config and no other quantized one."""
    remaining = {module.name: module for module in quantized if module.config == config}
    others = [module.name for module in quantized if module.config != config]
    found: list[str] = []
    for expression in dict.fromkeys(_expression(module) for module in remaining.values()):
        matches = re.compile(expression).match
        if any(matches(name) for name in others):
            continue
        found.append(f"re:{expression}")
        remaining = {name: module for name, module in remaining.items() if not matches(name)}
    return [*found, *remaining]


def _expression(module: StoredModule) -> str:
    """Return an expression for the modules of the same place in every block, and for those of all experts."""
    if module.container:
        below = re.sub(r"\d+", r"\\d+", re.escape(module.name[len(module.container) :]))
        return rf".*\.{re.escape(layer_type(module.container))}{below}$"
    return rf".*\.{re.escape(layer_type(module.name))}$"


def _ignored(modules: Sequence[StoredModule]) -> list[str]:
    """Return the names of unquantized modules; experts as their container and an expression for what is below it."""
    found: dict[str, None] = {}
    for module in modules:
        if module.config.is_quantized:
            continue
        if module.container:
            found[module.container] = None
            found[rf"re:{re.escape(module.container)}\..*"] = None
        else:
            found[module.name] = None
    return list(found)


def _group(config: LayerQuantConfig, targets: list[str]) -> dict[str, object]:
    weight = config.weight_key
    if weight is None:
        message = f"{config}: a group needs a weight format"
        raise PlanError(message)
    activation = config.activation_key
    return {
        "targets": targets,
        "weights": {**tensor_args(weight), "observer": "memoryless_minmax"},
        "input_activations": None if activation is None else tensor_args(activation),
        "output_activations": None,
        "format": storage_word(weight, activation),
    }


def storage_word(weight: QuantKey, activation: QuantKey | None) -> str:
    """Return compressed-tensors' word for how weights are stored.

    Raises:
        PlanError: it has none.
    """
    is_mx = weight.scale.dtype == E8M0
    if weight.element == FP4_E2M1:
        if is_mx:
            return "mxfp4-pack-quantized"
        if weight.second_scale is not None:
            return "nvfp4-pack-quantized"
    elif weight.element == FP8_E4M3:
        if is_mx and isinstance(weight.scale.granularity, PerGroup):
            return "mxfp8-quantized"
        return "naive-quantized" if activation is None else "float-quantized"
    elif weight.element == INT8:
        return "naive-quantized" if activation is None else "int-quantized"
    message = f"{weight}: compressed-tensors' layout has no word for it; write it as --export-format quark"
    raise PlanError(message)


def tensor_args(key: QuantKey) -> dict[str, object]:
    """Return compressed-tensors' description of a tensor's format.

    Args:
        key: a weight's or an activation's key.

    Raises:
        PlanError: it has no words for the format.
    """
    granularity = key.scale.granularity
    kind, strategy = _TYPES.get(key.element), _STRATEGIES.get(type(granularity))
    if kind is None or strategy is None:
        message = f"{key}: compressed-tensors' layout has no words for it; write it as --export-format quark"
        raise PlanError(message)
    if key.second_scale is not None:
        strategy = "tensor_group"
    return {
        "num_bits": key.element.bits,
        "type": kind,
        "symmetric": key.symmetric,
        "strategy": strategy,
        "group_size": granularity.group_size if isinstance(granularity, PerGroup) else None,
        "block_structure": [granularity.rows, granularity.cols] if isinstance(granularity, PerBlock) else None,
        "dynamic": bool(key.is_dynamic),
        "scale_dtype": _scale_dtype(key),
        "zp_dtype": None,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    }


def _scale_dtype(key: QuantKey) -> str | None:
    """Return the dtype of scales where it is part of the format; of plain ones the tensor itself tells it."""
    if key.scale.dtype == E8M0:
        return "torch.uint8"
    return "torch.float8_e4m3fn" if key.second_scale is not None else None
