"""Modules of a transformers model made ready to hold quantized weights, and which of its tensors those are."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Final, TypeVar, cast

import attrs
from torch import nn

from quant_kernels.activations import activation_word
from quant_kernels.checks import KernelInputError
from quant_kernels.loading.decisions import LayerPlan
from quant_kernels.loading.modules import WeightSlot
from quant_kernels.nn import PackedModule, PackedWeight, QuantizedLinear, decoding_class, experts_class
from quant_kernels.nn.experts import DOWN_NAME, UP_NAMES
from quant_spec import LoadError, QuantFormat, QuantSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from quant_kernels.loading.decisions import ModelDecisions
    from quant_kernels.loading.modules import LayerView
    from quant_spec import QuantKey

_Packed = TypeVar("_Packed", bound=PackedModule)
_ROUTED: Final = ("hidden_states", "top_k_index", "top_k_weights")
_BLOCK: Final = 128
_LISTED: Final = 4


@attrs.frozen(eq=False)
class HeldWeight:
    """One weight of the model that is held quantized.

    Attributes:
        name: full name of its parameter.
        layer: the layer that it belongs to, as decided.
        slot: what it was before.
        module: what holds it now.
        attribute: name of the parameter within the module.
        packed: its format and shape.
        target: what it is converted to; None: it keeps the format that the checkpoint has.
        plain_shape: shape of the parameter that it replaces.
    """

    name: str
    layer: LayerPlan
    slot: WeightSlot
    module: PackedModule
    attribute: str
    packed: PackedWeight
    target: QuantFormat | None
    plain_shape: tuple[int, ...]

    def tensor_names(self) -> tuple[str, ...]:
        """Return the full names of its codes and scales."""
        return tuple(self.name + suffix for suffix in self.packed.suffixes())

    def value(self) -> nn.Parameter:
        """Return what the module holds under the weight's name now."""
        found = self.module._parameters[self.attribute]  # noqa: SLF001  (an attribute of that name may decode it)
        assert found is not None  # noqa: S101  (hold() has registered it)
        return found

    def put(self, full_name: str, tensor: Tensor) -> None:
        """Put codes or scales into the module."""
        suffix = full_name.removeprefix(self.name)
        made = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        self.module._parameters[self.attribute + suffix] = made  # noqa: SLF001

    @property
    def splits_evenly(self) -> bool:
        """True unless blocks of scales span the seam of a fused gate and up, which checkpoints store one by one."""
        blocks = self.packed.target.block[0] == _BLOCK
        return not (blocks and self.packed.halves > 1 and (self.packed.shape[-2] // self.packed.halves) % _BLOCK)


def obstacles(layers: Mapping[str, LayerView]) -> dict[str, str]:
    """Return why layers cannot be held quantized whatever is asked for: their class computes in a way that is unknown.

    Args:
        layers: as `find_layers` returns them.
    """
    found = {}
    for name, layer in layers.items():
        for slot in layer.slots:
            if slot.role != "weight" and not _is_routed(slot.owner, slot.attribute):
                found[name] = (
                    f"{type(slot.owner).__name__}.forward{inspect.signature(type(slot.owner).forward)} is none of"
                    f" stacked experts ({', '.join(_ROUTED)})"
                )
    return found


def _is_routed(module: nn.Module, attribute: str) -> bool:
    """Tell whether a module is stacked experts of the form that transformers' experts implementations share."""
    marks = ("num_experts", "is_transposed", "has_gate", "has_bias")
    known = attribute in (*UP_NAMES, DOWN_NAME) and all(hasattr(module, mark) for mark in marks)
    original = inspect.unwrap(type(module).forward)
    parameters = tuple(inspect.signature(original).parameters)
    return known and parameters[1:] == _ROUTED and not getattr(module, "has_post_expert_norm", False)


def hold_weights(
    model: PreTrainedModel, decisions: ModelDecisions, dtype: torch.dtype, kept: Collection[str] = ()
) -> dict[str, HeldWeight]:
    """Replace modules by ones that hold their weights quantized; return those weights by full name.

    Linear layers become `QuantizedLinear`, stacked experts keep their class but for its forward pass, and any other
    module with a matrix called `weight` decodes it when it is used.

    Args:
        model: on meta.
        decisions: made from this model.
        dtype: of the model, which weights are decoded to.
        kept: layers that are not converted and hold the codes of the checkpoint.

    Raises:
        LoadError: a layer's format or activation is one that no module here computes with.
    """
    held: dict[str, HeldWeight] = {}
    refused: list[str] = []
    for layer in decisions.layers:
        if layer.target is None and layer.name not in kept:
            continue
        try:
            for slot in layer.view.slots:
                found = hold_weight(model, layer, slot, dtype)
                held[found.name] = found
        except QuantSpecError as error:
            refused.append(f"  {layer.name}: {error}")
    if refused:
        more = [f"  and {len(refused) - _LISTED} more"] if len(refused) > _LISTED else []
        message = f"{len(refused)} layers cannot be computed with:\n" + "\n".join([*refused[:_LISTED], *more])
        raise LoadError(message)
    return held


def parameter_dtype(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a plain parameter has in a model; some stay fp32 whatever the model's dtype is.

    Args:
        model: the model.
        name: full name of the parameter.
        dtype: of the model.
    """
    exceptions = model._get_dtype_plan(dtype) or {}  # noqa: SLF001  (there is no public name)
    return next((kept for pattern, kept in exceptions.items() if re.search(pattern.replace("*", ".*"), name)), dtype)


def _activation_of(layer: LayerPlan) -> QuantKey | None:
    """Return the format that a layer's inputs are quantized to.

    Scales of inputs that a checkpoint stores are not used: a layer that is kept then takes its inputs as they are.

    Raises:
        QuantSpecError: a request asks for an activation that no product has.
    """
    key = layer.decision.config.activation_key
    try:
        activation_word(key)
    except KernelInputError as error:
        if layer.target is None:
            return None
        message = f"activation: {error}"
        raise QuantSpecError(message) from error
    return key


def hold_weight(model: PreTrainedModel, layer: LayerPlan, slot: WeightSlot, dtype: torch.dtype) -> HeldWeight:
    """Have the module of one weight hold it quantized.

    Args:
        model: what the module is part of.
        layer: what becomes of it: converted, or kept as the checkpoint has it.
        slot: the weight.
        dtype: of the model.

    Raises:
        QuantSpecError: no module here computes with the format or the activation.
    """
    key = layer.target.weight if layer.target is not None else layer.decision.source.weight_key
    if key is None:
        message = f"{layer.name}: the checkpoint's config does not say that it is quantized"
        raise LoadError(message)
    halves = 2 if slot.role == "gate_up" and not slot.interleaved and not slot.transposed else 1
    packed, plain_shape = PackedWeight(key, slot.shape, halves), tuple(slot.tensor.shape)
    activation = _activation_of(layer)
    device = slot.tensor.device
    module: PackedModule
    if slot.role == "weight" and type(slot.owner).forward is nn.Linear.forward:
        linear = QuantizedLinear(
            slot.shape[1], slot.shape[0], key, activation=activation, bias=False, device=device, dtype=dtype
        )
        linear.bias = getattr(slot.owner, "bias", None)
        linear.train(slot.owner.training)
        parent, _, name = slot.owner_name.rpartition(".")
        setattr(model.get_submodule(parent), name, linear)
        module = linear
    elif slot.role == "weight":
        decoding = _swapped(slot.owner, decoding_class)
        decoding.decoded_dtype = parameter_dtype(model, slot.name, dtype)
        module = decoding
    else:
        experts = _swapped(slot.owner, experts_class)
        experts.activation = activation
        experts.__dict__["is_transposed"] = False
        module = experts
    module.hold(slot.attribute, packed, device)
    for name, value in (("quant_type", layer.decision.config.quant_type), ("quant_config", layer.decision.config)):
        module.__dict__[name] = value
    return HeldWeight(slot.name, layer, slot, module, slot.attribute, packed, layer.target, plain_shape)


def _swapped(module: nn.Module, make: Callable[[type[nn.Module]], type[_Packed]]) -> _Packed:
    """Give a module the class that `make` derives from its own, unless it has one already; return it."""
    if not isinstance(module, PackedModule):
        module.__class__ = make(type(module))
        # Where tensors are missing, transformers would initialize the module as one of its old class: codes as values.
        module.__dict__["_is_hf_initialized"] = True
    return cast("_Packed", module)
