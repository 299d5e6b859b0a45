"""Arguments of the public functions, checked for their types before anything is done with them.

A value of any kind may arrive here. Each check names the argument, what was found and what is allowed; what passes can
be handed to the kernels, or to the checks of dtypes, shapes and devices in `quant_kernels.checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quant_kernels.checks import WEIGHT_DTYPES, KernelInputError, dtype_name
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS
from quant_spec import QuantFormat, QuantKey, get_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

PLAIN_TYPES: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Kinds of tensors that are nothing but memory, or memory with a name."""

_LARGEST: Final = torch.iinfo(torch.int64).max
_SHOWN: Final = 40
_BUILT_IN: Final = {name: get_format(name) for name in TARGETS}


def described(value: object) -> str:
    """Return a short text of what a value is: its type, and itself where that is short."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, torch.dtype):
        return f"dtype {dtype_name(value)}"
    name = type(value).__name__
    if isinstance(value, (int, float, str, bytes)):
        shown = repr(value)
        return f"{name} {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}"
    if isinstance(value, (list, tuple)):
        return f"{name} of {len(value)}"
    return f"a {name}"


def check_type(argument: str, value: object, kind: type[T], allowed: str) -> T:
    """Return a value that is of a kind; True and False are no numbers.

    Raises:
        KernelInputError: it is of another kind.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise KernelInputError(argument, described(value), allowed)
    return value


def check_flags(**flags: object) -> None:
    """Refuse a switch that is neither True nor False.

    Raises:
        KernelInputError: one is something else; it is named.
    """
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise KernelInputError(argument, described(value), "True, False")


def check_tensor(argument: str, value: object) -> Tensor:
    """Return a tensor that kernels can read: strided, whole, not of a kind that hides its memory.

    A tensor that is negated only when it is read (`torch._neg_view`, parts of conjugated ones) is negated here.

    Raises:
        KernelInputError: it is no tensor, or not such a one.
    """
    tensor = check_type(argument, value, Tensor, "a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "a nested tensor" if tensor.is_nested else f"layout {str(tensor.layout).removeprefix('torch.')}"
        raise KernelInputError(argument, found, "strided")
    if tensor.is_quantized:
        raise KernelInputError(argument, f"dtype {dtype_name(tensor.dtype)}", "a tensor that torch has not quantized")
    if torch.compiler.is_compiling():
        return tensor
    if type(tensor) not in PLAIN_TYPES and _hides_others(tensor):
        raise KernelInputError(argument, f"a {type(tensor).__name__}", "a plain tensor (of a DTensor, its local one)")
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _hides_others(value: object) -> bool:
    return bool(is_traceable_wrapper_subclass(value))


def check_destination(argument: str, value: object) -> Tensor:
    """Return a tensor that kernels can write to.

    Raises:
        KernelInputError: as `check_tensor`; or it is a view that negates, or autograd would have to follow the write.
    """
    tensor = check_tensor(argument, value)
    if tensor is not value:
        raise KernelInputError(argument, "a view that negates what is in memory", "a tensor that holds its values")
    if torch.compiler.is_compiling():
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise KernelInputError(argument, "a tensor that requires grad", "one that does not, or torch.no_grad()")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise KernelInputError(argument, "a tensor of inference mode", "one made outside, or torch.inference_mode()")
    return tensor


def check_float(argument: str, value: object) -> torch.dtype:
    """Return a dtype that weights have.

    Raises:
        KernelInputError: it is no dtype, or another.
    """
    if not isinstance(value, torch.dtype) or value not in WEIGHT_DTYPES:
        raise KernelInputError(argument, described(value), ", ".join(map(dtype_name, WEIGHT_DTYPES)))
    return value


def check_offset(value: object) -> tuple[int, int]:
    """Return the place of a first element in its block of scales.

    Raises:
        KernelInputError: it is not two numbers that are not negative.
    """
    numbers = _whole_numbers(value)
    if numbers is None or len(numbers) != 2 or min(numbers) < 0:  # noqa: PLR2004  (rows and columns)
        raise KernelInputError("offset", _told(value), "two whole numbers that are not negative")
    return numbers[0], numbers[1]


def check_shard_rows(value: object) -> tuple[int, ...] | None:
    """Return the rows of the shards of a fused weight; None if there are no shards.

    Raises:
        KernelInputError: it is no list of whole numbers that are not negative.
    """
    if value is None:
        return None
    numbers = _whole_numbers(value)
    if numbers is None or (numbers and min(numbers) < 0):
        raise KernelInputError("shard_rows", _told(value), "None, or whole numbers that are not negative")
    return numbers


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return None
    if any(isinstance(each, bool) or not isinstance(each, int) or abs(each) > _LARGEST for each in value):
        return None
    return tuple(value)


def _told(value: object) -> str:
    return repr(value) if isinstance(value, (list, tuple)) and len(repr(value)) <= _SHOWN else described(value)


def check_quantized(argument: str, value: object) -> QuantizedTensor:
    """Return a quantized weight whose parts are of the right kinds.

    Raises:
        KernelInputError: it, or a part of it, is something else.
    """
    q = check_type(argument, value, QuantizedTensor, "a QuantizedTensor")
    data, scale = check_tensor(f"{argument}.data", q.data), check_tensor(f"{argument}.scale", q.scale)
    key = check_type(f"{argument}.key", q.key, QuantKey, "a QuantKey")
    shape = _whole_numbers(q.shape)
    if shape is None:
        raise KernelInputError(f"{argument}.shape", described(q.shape), "whole numbers")
    second = None if q.second_scale is None else check_tensor(f"{argument}.second_scale", q.second_scale)
    if data is q.data and scale is q.scale and second is q.second_scale:
        return q
    return QuantizedTensor(data, scale, key, shape, second, q.error_sums)


def check_destinations(argument: str, value: object) -> QuantizedTensor:
    """Return a quantized weight whose parts can be written to.

    Raises:
        KernelInputError: it, or a part of it, is something else.
    """
    q = check_type(argument, value, QuantizedTensor, "a QuantizedTensor")
    check_destination(f"{argument}.data", q.data)
    check_destination(f"{argument}.scale", q.scale)
    if q.second_scale is not None:
        check_destination(f"{argument}.second_scale", q.second_scale)
    return q


def check_list(argument: str, value: object) -> Sequence[object]:
    """Return a list or tuple.

    Raises:
        KernelInputError: it is something else.
    """
    if not isinstance(value, (list, tuple)):
        raise KernelInputError(argument, described(value), "a list or tuple")
    return value


def check_names(value: object, places: Iterable[str], count: int) -> list[str]:
    """Return what errors call the weights of a list: given names, or their places.

    Raises:
        KernelInputError: not one text a weight.
    """
    if value is None:
        return list(places)
    names = [check_type(f"names[{i}]", each, str, "a text") for i, each in enumerate(check_list("names", value))]
    if len(names) != count:
        raise KernelInputError("names", f"{len(names)} entries", f"{count}, one a weight")
    return names


def as_format(argument: str, value: object) -> QuantFormat:
    """Return a format, or the registered one of that name.

    Raises:
        KernelInputError: the argument is neither a name nor a format.
        quant_spec.ConfigError: no format has that name.
    """
    if isinstance(value, QuantFormat):
        return value
    word = check_type(argument, value, str, "the name of a format, or a QuantFormat")
    return _BUILT_IN.get(word) or (_registered(word) if torch.compiler.is_compiling() else get_format(word))


class _Registered:
    """Formats without kernels that were asked for, as attributes: a graph looks them up when it is recorded."""


def _ask(word: str) -> bool:
    setattr(_Registered, word.replace(".", "_"), get_format(word))
    return True


# The registry is locked while it is asked, which a graph cannot do: it takes what comes back for a constant.
_asked = cast("Callable[[str], bool]", torch.compiler.assume_constant_result(_ask))


def _registered(word: str) -> QuantFormat:
    _asked(word)
    return cast("QuantFormat", getattr(_Registered, word.replace(".", "_")))


def as_key(argument: str, value: object) -> QuantKey:
    """Return a key, or the one that a text stands for.

    Raises:
        KernelInputError: the argument is neither a text nor a key.
        quant_spec.ConfigError: the text is no key.
    """
    if isinstance(value, QuantKey):
        return value
    return QuantKey.parse(check_type(argument, value, str, "the text of a QuantKey, or a QuantKey"))
