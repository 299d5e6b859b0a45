"""Packed weights: how a module holds the codes and scales of a weight as parameters of its own.

A weight called X is held as X, X_scale and, for NVFP4, X_scale_2. E8M0 scales and packed 4-bit codes are uint8, as
checkpoints have them; every other dtype is the format's, whatever torch's default dtype is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor, nn

from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS
from quant_spec import QuantKey, QuantSpecError
from quant_spec.formats import format_of_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from quant_kernels.targets import Target

SCALE: Final = "_scale"
SECOND_SCALE: Final = "_scale_2"
_STACK: Final = 3


@attrs.frozen
class PackedWeight:
    """A quantized weight that a module holds: its format and shape, not its values.

    Attributes:
        key: the format; one of those that kernels write.
        shape: [N, K] or [E, N, K], in elements.
        halves: 2 for a stack of fused gate and up projections, which checkpoints store one by one; else 1. NVFP4's
            second scale, one an expert, is then held once a projection.
    """

    key: QuantKey
    shape: tuple[int, ...]
    halves: int = 1

    @property
    def target(self) -> Target:
        """Storage of the format.

        Raises:
            QuantSpecError: no kernel reads it.
        """
        found = format_of_key(self.key)
        if found is None or found.name not in TARGETS:
            message = f"found {self.key}; modules here can hold: {', '.join(TARGETS)}"
            raise QuantSpecError(message)
        return TARGETS[found.name]

    @property
    def has_second_scale(self) -> bool:
        """True if the format has a scale of the scales."""
        return self.key.second_scale is not None

    def suffixes(self) -> tuple[str, ...]:
        """Return what is put behind the weight's name for each tensor; the codes' comes first and is empty."""
        return ("", SCALE, SECOND_SCALE) if self.has_second_scale else ("", SCALE)

    def empty(self, device: torch.device | str | None) -> dict[str, nn.Parameter]:
        """Return parameters of the right shapes and dtypes by suffix, with any values."""
        target = self.target
        made = {
            "": torch.empty(target.data_shape(self.shape), dtype=target.op_data_dtype, device=device),
            SCALE: torch.empty(target.scale_shape(self.shape), dtype=target.op_scale_dtype, device=device),
        }
        if self.has_second_scale:
            made[SECOND_SCALE] = torch.empty(self._second_shape(), dtype=torch.float32, device=device)
        return {suffix: nn.Parameter(tensor, requires_grad=False) for suffix, tensor in made.items()}

    def stored(self, weight: QuantizedTensor) -> dict[str, nn.Parameter]:
        """Return the tensors of a converted weight as the module holds them, by suffix."""
        target = self.target
        made = {"": weight.data.view(target.op_data_dtype), SCALE: weight.scale.view(target.op_scale_dtype)}
        if weight.second_scale is not None:
            second = weight.second_scale
            made[SECOND_SCALE] = (
                second.reshape(-1, 1).expand(self._second_shape()).contiguous() if second.dim() else second
            )
        return {suffix: nn.Parameter(tensor, requires_grad=False) for suffix, tensor in made.items()}

    def quantized(self, data: Tensor, scale: Tensor, second: Tensor | None = None) -> QuantizedTensor:
        """Return held tensors as what the kernels read; no copy."""
        target = self.target
        if second is not None and second.dim():
            second = second[:, 0]
        return QuantizedTensor(
            data.view(target.data_dtype), scale.view(target.scale_dtype), self.key, self.shape, second
        )

    def _second_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.halves) if len(self.shape) == _STACK else ()


class PackedModule(nn.Module):
    """Base of modules that hold packed weights: these keep their dtypes whatever the module is cast to.

    Attributes:
        packed: name of a weight -> what it is.
    """

    packed: dict[str, PackedWeight]

    def hold(self, name: str, weight: PackedWeight, device: torch.device | str | None) -> None:
        """Register the parameters of a weight, in place of one of that name.

        Raises:
            QuantSpecError: no kernel reads its format.
        """
        self.__dict__.setdefault("packed", {})[name] = weight
        for suffix, parameter in weight.empty(device).items():
            self._parameters[name + suffix] = parameter

    def quantized(self, name: str) -> QuantizedTensor:
        """Return a held weight as what the kernels read; no copy."""
        held = self._parameters
        data, scale = held[name], held[name + SCALE]
        assert data is not None  # noqa: S101  (hold() has registered both)
        assert scale is not None  # noqa: S101
        return self.packed[name].quantized(data, scale, held.get(name + SECOND_SCALE))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (nn.Module's)
        """Move packed tensors, but never cast them: half() of a code is another code."""
        held = {name + suffix for name, weight in self.packed.items() for suffix in weight.suffixes()}
        codes = {name: self._parameters.pop(name) for name in [*self._parameters] if name in held}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch annotates a part of nn.Module
        finally:
            rest = dict(self._parameters)
            self._parameters.clear()
            for name, parameter in codes.items():
                self._parameters[name] = parameter
            self._parameters.update(rest)
        for name, parameter in codes.items():
            if parameter is None:
                continue
            moved = _moved(parameter, fn)
            if moved is not parameter:
                self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        return self


def _moved(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor where `fn` puts it, with its own dtype.

    Floating-point codes are shown to `fn` as bytes, which casts leave alone.
    """
    if parameter.dtype is torch.float32:
        placed = fn(parameter.detach().view(torch.int32))
        return placed.view(torch.float32)
    return fn(parameter.detach().view(torch.uint8)).view(parameter.dtype)
