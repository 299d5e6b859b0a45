"""Stored tensors: which tensor is a module's weight scale, and whether all that a quantized module needs is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from quant_spec.arguments import check_instance, check_mapping, check_strings
from quant_spec.decision import FLOAT_DTYPES
from quant_spec.errors import LoadError, shown

if TYPE_CHECKING:
    from quant_spec.config import QuantizationConfig

WEIGHT_NAMES: Final = ("weight", "weight_packed")
"""Last parts of a quantized weight's own tensor."""
SCALE_NAMES: Final = ("weight_scale", "weight_scale_inv", "weight_quantizer.scale")
"""Spellings of a weight's scale. Each multiplies the weight, whatever its name says; two at once are an error."""
INPUT_SCALE_NAMES: Final = ("input_scale", "input_quantizer.scale", "act_scale")
"""Spellings of a stored activation scale."""


def weight_scale_of(module: str, tensors: Iterable[str]) -> str | None:
    """Return the name of the tensor that is the weight scale of `module`, or None.

    Raises:
        LoadError: two spellings are there at once.
        ArgumentError: an argument is something else.
    """
    check_instance("module", module, str)
    known = tensors if isinstance(tensors, (set, frozenset, Mapping)) else set(check_strings("tensors", tensors))
    found = [f"{module}.{name}" for name in SCALE_NAMES if f"{module}.{name}" in known]
    if len(found) > 1:
        message = f"{module}: more than one weight scale: {', '.join(found)}; a module has one"
        raise LoadError(message)
    return found[0] if found else None


def scale_tensors(config: QuantizationConfig, tensors: Mapping[str, str | None]) -> dict[str, str]:
    """Check that quantized modules have their scales, and return module -> its weight scale.

    Args:
        config: the checkpoint's config, or a request over it.
        tensors: name -> dtype (as safetensors or torch name it; None: unknown) of all tensors of the modules.

    Raises:
        LoadError: a quantized module lacks its weight scale or a static activation's `input_scale`; all such, by name.
        ArgumentError: an argument is something else.
    """
    from quant_spec.config import QuantizationConfig  # noqa: PLC0415  (it is loaded already where one is given)

    check_instance("config", config, QuantizationConfig)
    check_mapping("tensors", tensors)
    if not set(map(type, tensors.values())) <= {str, type(None)}:
        for name, dtype in tensors.items():
            check_instance(f"tensors[{shown(name)}]", dtype, str, none=True)
    stored = config.source or config
    found: dict[str, str] = {}
    missing: list[str] = []
    if "weight" not in stored.tensor_names and "weight_packed" not in stored.tensor_names:
        return found
    scaled = any(name in SCALE_NAMES for name in stored.tensor_names)
    for tensor, dtype in tensors.items():
        module, _, last = tensor.rpartition(".")
        if last not in WEIGHT_NAMES or dtype in FLOAT_DTYPES:
            continue
        spec = stored.resolve(config.names.to_module(module))
        scale = weight_scale_of(module, tensors)
        if scale is not None:
            found[module] = scale
        elif spec.is_quantized and scaled:
            missing.append(
                f"{module}.weight_scale: missing; {tensor} is stored as {spec.weight} ({' or '.join(SCALE_NAMES)})"
            )
        activation = spec.activation_key
        static = activation is not None and activation.scale.dynamic is False
        if static and not any(f"{module}.{name}" in tensors for name in INPUT_SCALE_NAMES):
            missing.append(f"{module}.input_scale: missing; its activation is {activation}")
    if missing:
        raise LoadError("\n".join(missing))
    return found
