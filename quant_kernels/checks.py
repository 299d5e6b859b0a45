"""Checks of arguments and values: every error names the argument, what was found and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_spec import LoadError, QuantSpecError
from quant_spec.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant_spec import QuantFormat

WEIGHT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_SHOWN_ROWS: Final = 5


class KernelInputError(QuantSpecError, ValueError):
    """An argument of a conversion was refused; nothing was written.

    Attributes:
        argument: name of the argument.
    """

    def __init__(self, argument: str, found: str, allowed: str) -> None:
        """Say which argument was refused, what it was, and what it may be."""
        self.argument = argument
        super().__init__(f"{argument}: found {found}; allowed: {allowed}")


class NonFiniteError(LoadError):
    """A checked conversion met NaN or Inf. Tensors given as `out` hold undefined values.

    Attributes:
        name: the tensor.
        rows: indices of the first bad rows, counted over all leading dimensions.
        count: bad rows (PTPC), scale groups or blocks in the whole tensor.
    """

    def __init__(self, name: str, rows: Sequence[int], count: int, unit: str) -> None:
        """Say which tensor and rows hold bad values."""
        self.name, self.rows, self.count = name, tuple(rows), count
        listed = ", ".join(map(str, self.rows[:_SHOWN_ROWS]))
        super().__init__(f"{name}: {count} {unit} hold NaN or Inf (or a bad scale); first bad rows: {listed}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among the allowed ones, with the nearest of them.

    Raises:
        KernelInputError: it is not, or is no text.
    """
    if not isinstance(value, str):
        raise KernelInputError(argument, "None" if value is None else f"a {type(value).__name__}", ", ".join(allowed))
    if value not in allowed:
        near = nearest(value, allowed)
        hint = f"; did you mean {near!r}?" if near else ""
        raise KernelInputError(argument, repr(value), ", ".join(allowed) + hint)


def check_scale_rounding(value: object, quant_format: QuantFormat) -> None:
    """Refuse a rounding of scales that a format does not have.

    Raises:
        KernelInputError: it has none, or others.
    """
    if not quant_format.scale_roundings:
        found = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise KernelInputError("scale_rounding", found, f"None for {quant_format.name}")
    check_choice("scale_rounding", value, quant_format.scale_roundings)


def check_rank(argument: str, tensor: Tensor) -> None:
    """Refuse a tensor that is neither a matrix nor a stack of matrices.

    Raises:
        KernelInputError: it is neither.
    """
    if tensor.dim() not in (2, 3):
        raise KernelInputError(
            argument, f"{tensor.dim()} dimensions {list(tensor.shape)}", "2 [N, K] or 3 [E, N, K] dimensions"
        )


def check_dtype(argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a tensor of another dtype.

    Raises:
        KernelInputError: its dtype is not allowed.
    """
    if tensor.dtype not in allowed:
        raise KernelInputError(argument, f"dtype {dtype_name(tensor.dtype)}", ", ".join(map(dtype_name, allowed)))


def check_shape(argument: str, tensor: Tensor, allowed: Sequence[int]) -> None:
    """Refuse a tensor of another shape.

    Raises:
        KernelInputError: its shape differs.
    """
    if tuple(tensor.shape) != tuple(allowed):
        raise KernelInputError(argument, f"shape {list(tensor.shape)}", str(list(allowed)))


def check_device(argument: str, tensor: Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device than the source.

    Raises:
        KernelInputError: it is elsewhere.
    """
    if tensor.device != device:
        raise KernelInputError(argument, f"device {tensor.device}", f"{device}, where the source is")


def check_k(argument: str, k: int, multiple: int, what: str) -> None:
    """Refuse an input side that is not a multiple of the scale group.

    Raises:
        KernelInputError: it is not.
    """
    if k % multiple:
        raise KernelInputError(argument, f"K = {k}", f"a multiple of {multiple} for {what}")


def check_output(argument: str, out: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a destination of another shape or dtype, with gaps along its last side or with elements that coincide.

    Raises:
        KernelInputError: it cannot be written.
    """
    check_dtype(argument, out, dtypes)
    check_shape(argument, out, shape)
    if out.is_contiguous():
        return
    if out.numel() == 0 or out.dim() == 0:
        return
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise KernelInputError(argument, f"stride {out.stride(-1)} along its last side", "1")
    reach = 1
    for size, stride in sorted(zip(out.shape, out.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            raise KernelInputError(argument, f"strides {list(out.stride())} by which elements coincide", "no overlap")
        reach = max(reach, stride * (size - 1) + reach)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last byte that a tensor's elements occupy."""
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def check_disjoint(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Refuse destinations that share bytes with a source or with each other.

    Raises:
        KernelInputError: two of them overlap.
    """
    if torch.compiler.is_compiling():
        return  # a graph has no addresses yet
    destinations = [(name, *byte_range(tensor)) for name, tensor in written.items()]
    others = [*destinations, *((name, *byte_range(tensor)) for name, tensor in read.items())]
    for index, (name, begin, end) in enumerate(destinations, 1):
        for other, start, stop in others[index:]:
            if begin < stop and start < end:
                raise KernelInputError(name, f"memory shared with {other}", "memory of its own")
