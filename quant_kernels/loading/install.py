"""Puts converted weights into modules: codes for the weight, scales beside it, attributes; the old weight is freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import Tensor, nn

from quant_kernels.loading.modules import TRANSPOSED_ATTRIBUTE
from quant_kernels.loading.sources import SECOND_SUFFIX, StoredScales

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_kernels.loading.modules import LayerView, WeightSlot
    from quant_kernels.quantized import QuantizedTensor
    from quant_spec import LayerQuantConfig

SCALE_SUFFIX: Final = "_scale"


def install(slot: WeightSlot, result: QuantizedTensor, old: StoredScales, offset: tuple[int, int]) -> None:
    """Replace a weight by its codes, and register its scales beside it.

    The weight X becomes a parameter (a buffer if it was one) that needs no gradient; `X_scale`, and for NVFP4
    `X_scale_2`, are buffers of the dtypes that the format has, whatever torch's default dtype is. Experts that were
    stored [expert, input, output] are [expert, output, input] now, and `is_transposed` is False.

    Args:
        slot: the weight.
        result: codes and scales.
        old: what described the replaced weight; removed.
        offset: row and column of the first element within the first block of scales; kept as `X_block_offset`.
    """
    owner, attribute = slot.owner, slot.attribute
    for path in old.attributes:
        remove(owner, path)
    put_weight(slot, result.data)
    if slot.transposed:
        mark_turned(owner)
    put_buffer(owner, attribute + SCALE_SUFFIX, result.scale)
    if result.second_scale is not None:
        put_buffer(owner, attribute + SECOND_SUFFIX, result.second_scale)
    note = f"{attribute}_block_offset"
    if any(offset):
        setattr(owner, note, offset)
    elif hasattr(owner, note):
        delattr(owner, note)


def mark_turned(owner: nn.Module) -> None:
    """Note that the stacks of a module lie [expert, output, input] from now on."""
    owner.__dict__[TRANSPOSED_ATTRIBUTE] = False


def put_weight(slot: WeightSlot, value: Tensor) -> None:
    """Replace the tensor of a slot; attributes that engines keep on a parameter stay."""
    owner, attribute = slot.owner, slot.attribute
    old = owner._parameters.get(attribute)  # noqa: SLF001  (tells a parameter from a buffer)
    if attribute in owner._buffers:  # noqa: SLF001
        owner._buffers[attribute] = value  # noqa: SLF001
        return
    new = nn.Parameter(value, requires_grad=False)
    if old is not None:
        new.__dict__.update(old.__dict__)
    owner._parameters[attribute] = new  # noqa: SLF001


def put_buffer(owner: nn.Module, name: str, value: Tensor) -> None:
    """Register a buffer, whatever had that name before."""
    remove(owner, name)
    owner.register_buffer(name, value)


def remove(owner: nn.Module, path: str) -> None:
    """Remove a tensor below a module, by a dotted path."""
    *above, last = path.split(".")
    holder: object = owner
    for part in above:
        holder = getattr(holder, part, None)
    if isinstance(holder, nn.Module) and _holds(holder, last):
        delattr(holder, last)


def _holds(module: nn.Module, name: str) -> bool:
    """Tell whether a module has an attribute of its own; hasattr takes ten times as long when it has not."""
    registered = (module._parameters, module._buffers, module._modules)  # noqa: SLF001
    return any(name in each for each in registered) or name in module.__dict__


def mark(view: LayerView, config: LayerQuantConfig) -> None:
    """Set `quant_type` and `quant_config` on the layer's module and on those below that hold its weights."""
    owners: Iterable[nn.Module] = (slot.owner for slot in view.slots)
    quant_type = config.quant_type
    for module in {id(each): each for each in (*owners, view.module) if each is not None}.values():
        # Plain attributes: the setter of a module, which looks for parameters first, takes ten times as long.
        module.__dict__["quant_type"] = quant_type
        module.__dict__["quant_config"] = config


def tensor_nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a tensor that modules share counts once."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001  (parameters() builds every name)
            tensors.update((id(each), each) for each in held.values() if each is not None)
    return sum(each.nbytes for each in tensors.values() if not each.is_meta)
