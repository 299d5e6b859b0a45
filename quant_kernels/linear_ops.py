"""torch operators of the linear product: `torch.ops.quant_kernels.linear`, its `out` form and its gradient.

A weight is codes with `scale` (and `second_scale`, `block`) as in `quant_kernels.encodings.Encoded`; E8M0 scales and
packed codes are uint8 at this level, and FP8 codes may be (`element` then says `e4m3` or `e4m3fnuz`). The activation is
a word of `quant_kernels.activations.ACTIVATIONS`, or empty: not quantized. Every operator has a fake kernel and runs on
every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.activations import check_activation
from quant_kernels.checks import KernelInputError, check_choice, check_device
from quant_kernels.encodings import Encoded
from quant_kernels.linear_run import run_linear, weight_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

_ELEMENTS: Final = {
    "": torch.uint8,
    "e2m1": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
_ARGUMENTS: Final = (
    "Tensor x, Tensor data, Tensor scale, Tensor? second_scale=None, int[2] block=[1, 1], "
    'str element="", Tensor? bias=None, str activation=""'
)
_library: Final = torch.library.Library("quant_kernels", "FRAGMENT")


def encoded_weight(
    data: Tensor, scale: Tensor, second_scale: Tensor | None, block: Sequence[int], element: str
) -> Encoded:
    """Return the weight [N, K] that the arguments of an operator describe.

    Raises:
        KernelInputError: it is not a matrix, or `element` is unknown.
    """
    check_choice("element", element, tuple(_ELEMENTS))
    if data.dim() != 2:  # noqa: PLR2004
        raise KernelInputError("data", f"{data.dim()} dimensions {list(data.shape)}", "2 dimensions [N, K]")
    data = data.view(_ELEMENTS[element]) if data.dtype is torch.uint8 else data
    columns = data.shape[1] * (2 if data.dtype is torch.uint8 else 1)
    if second_scale is not None:
        scale = scale.view(torch.float8_e4m3fn)
    return Encoded(data, scale, second_scale, (block[0], block[1]), (0, 0), (data.shape[0], columns))


def output_shape(x: Tensor, weight: Encoded, bias: Tensor | None, activation: str) -> tuple[int, ...]:
    """Return the shape of the product of operands that fit.

    Raises:
        KernelInputError: they do not.
    """
    n, k = weight.shape
    if x.dim() < 1 or x.shape[-1] != k:
        raise KernelInputError("x", f"shape {list(x.shape)}", f"[.., {k}], the weight's input side")
    check_device("x", x, weight.data.device)
    if bias is not None and tuple(bias.shape) != (n,):
        raise KernelInputError("bias", f"shape {list(bias.shape)}", f"[{n}], the weight's output side")
    check_activation(activation, k)
    return (*x.shape[:-1], n)


def _linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    element: str = "",
    bias: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    weight = encoded_weight(data, scale, second_scale, block, element)
    out = x.new_empty(output_shape(x, weight, bias, activation))
    run_linear(x, weight, bias, activation, out)
    return out


def _linear_out(  # noqa: PLR0913
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    element: str = "",
    bias: Tensor | None = None,
    activation: str = "",
    *,
    out: Tensor,
) -> None:
    weight = encoded_weight(data, scale, second_scale, block, element)
    shape = output_shape(x, weight, bias, activation)
    if tuple(out.shape) != shape or out.dtype is not x.dtype:
        raise KernelInputError("out", f"{out.dtype} {list(out.shape)}", f"{x.dtype} {list(shape)}")
    run_linear(x, weight, bias, activation, out)


def _linear_fake(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    element: str = "",
    bias: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    weight = encoded_weight(data, scale, second_scale, block, element)
    return x.new_empty(output_shape(x, weight, bias, activation))


def _fake_nothing(*_arguments: object, **_options: object) -> None:
    """Stand for an operator that only writes to its destination."""


def _input_gradient(
    gradient: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    element: str = "",
) -> Tensor:
    """Return gradient x weight [.., K]: the gradient of the product by its input."""
    weight = encoded_weight(data, scale, second_scale, block, element)
    flat = gradient.reshape(-1, weight.shape[0])
    total = torch.zeros((flat.shape[0], weight.shape[1]), dtype=torch.float32, device=flat.device)
    for rows, tile in weight_tiles(weight, gradient.dtype):
        total += flat[:, rows] @ tile
    return total.to(gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])


def _input_gradient_fake(
    gradient: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    element: str = "",
) -> Tensor:
    weight = encoded_weight(data, scale, second_scale, block, element)
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[1]))


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    del output
    _, data, scale, second_scale, block, element, bias, _ = inputs
    ctx.save_for_backward(data, scale, second_scale)  # type: ignore[arg-type]
    ctx.format = (block, element)  # type: ignore[attr-defined]
    ctx.biased = bias is not None  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by x and bias. A quantized activation passes its gradient on as if it had not been rounded."""
    data, scale, second_scale = ctx.saved_tensors  # type: ignore[attr-defined]
    block, element = ctx.format  # type: ignore[attr-defined]
    needs: tuple[bool, ...] = ctx.needs_input_grad  # type: ignore[attr-defined]
    by_x = by_bias = None
    if needs[0]:
        by_x = torch.ops.quant_kernels.linear_input_gradient(gradient, data, scale, second_scale, block, element)
    if ctx.biased and needs[6]:  # type: ignore[attr-defined]
        by_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
    return by_x, None, None, None, None, None, by_bias, None


def _register() -> None:
    _library.define(f"linear({_ARGUMENTS}) -> Tensor")
    _library.define(f"linear.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()")
    _library.define(
        "linear_input_gradient(Tensor gradient, Tensor data, Tensor scale, Tensor? second_scale=None, "
        'int[2] block=[1, 1], str element="") -> Tensor'
    )
    for name, kernel, fake in (
        ("linear", _linear, _linear_fake),
        ("linear.out", _linear_out, _fake_nothing),
        ("linear_input_gradient", _input_gradient, _input_gradient_fake),
    ):
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"quant_kernels::{name}", fake, lib=_library)
    torch.library.register_autograd("quant_kernels::linear", _backward, setup_context=_setup_context, lib=_library)


_register()
