"""Formats without kernels: quantized by the plain-torch function that the format itself names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from quant_kernels.checks import KernelInputError, NonFiniteError, check_k, check_scale_rounding
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from quant_spec import QuantFormat

    Quantizer: TypeAlias = Callable[[Tensor, str | None], tuple[Tensor, Tensor, Tensor | None]]


def quantize_by_reference(
    w: Tensor,
    quant_format: QuantFormat,
    scale_rounding: str | None,
    *,
    check: bool,
    name: str,
    unfit: dict[str, bool],
) -> QuantizedTensor:
    """Quantize by the plain-torch function that a format names.

    Args:
        w: float32, float16 or bfloat16 [.., N, K].
        quant_format: a format that has no kernels.
        scale_rounding: one of the format's; None: its default.
        check: raise if there is NaN or Inf (one synchronisation).
        name: what errors call the weight.
        unfit: options that only kernels have, and whether each was asked for.

    Raises:
        KernelInputError: the format has no conversion, or an argument does not fit it.
        NonFiniteError: `check` found NaN or Inf.
    """
    quantizer = _quantizer(quant_format)
    for argument, given in unfit.items():
        if given:
            raise KernelInputError(argument, "a value", f"none for {quant_format.name}, which has no kernels")
    if scale_rounding is not None:
        check_scale_rounding(scale_rounding, quant_format)
    check_k(name, w.shape[-1], quant_format.k_multiple, quant_format.name)
    if check:
        _check_finite(w, name)
    data, scale, second = quantizer(w, scale_rounding)
    return QuantizedTensor(data, scale, quant_format.weight, tuple(w.shape), second)


def _quantizer(quant_format: QuantFormat) -> Quantizer:
    named = quant_format.reference
    if named is None:
        raise KernelInputError("format", repr(quant_format.name), f"one with a conversion: {', '.join(TARGETS)}")
    if not isinstance(named, str):
        return cast("Quantizer", named)
    if not torch.compiler.is_compiling():
        return _imported(named)
    place = quant_format.name.replace(".", "_")
    _put(place, named)
    return cast("Quantizer", getattr(_Imported, place))


def _imported(named: str) -> Quantizer:
    module, _, attribute = named.partition(":")
    return cast("Quantizer", getattr(importlib.import_module(module), attribute))


class _Imported:
    """Functions of formats as attributes: a graph looks them up when it is recorded, but cannot follow an import."""


def _import(place: str, named: str) -> bool:
    setattr(_Imported, place, staticmethod(_imported(named)))
    return True


# What comes back is a constant of the graph: the import is done while it is recorded.
_put = cast("Callable[[str, str], bool]", torch.compiler.assume_constant_result(_import))


def _check_finite(w: Tensor, name: str) -> None:
    bad = (~w.isfinite()).any(-1).flatten().nonzero().flatten().tolist()
    if bad:
        raise NonFiniteError(name, bad[:5], len(bad), "rows")
