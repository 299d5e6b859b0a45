"""linear: the product of an activation with a quantized weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from quant_kernels.activations import activation_word
from quant_kernels.checks import (
    WEIGHT_DTYPES,
    KernelInputError,
    check_device,
    check_disjoint,
    check_dtype,
    check_output,
)
from quant_kernels.encodings import encode_source
from quant_kernels.linear_ops import output_shape
from quant_kernels.linear_run import run_linear

if TYPE_CHECKING:
    from quant_kernels.quantized import QuantizedTensor
    from quant_spec import QuantKey

_ELEMENTS = {torch.uint8: "e2m1", torch.float8_e4m3fn: "e4m3", torch.float8_e4m3fnuz: "e4m3fnuz"}


def linear(
    x: Tensor,
    weight: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: QuantKey | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x · ŵᵀ + bias, where ŵ = code x scale; sums are taken in fp32 and rounded to the dtype of `x`.

    Never holds more of the weight in the dtype of `x` than a bounded tile. Differentiable by `x` and `bias`.

    Args:
        x: float32, float16 or bfloat16 [.., K].
        weight: a quantized matrix [N, K] in row-major order, on the device of `x`.
        bias: [N], of any float dtype.
        activation: what `x` is quantized to first, with scales made from it: FP8 `per_token`, `per_tensor` or
            `group_128`, `mxfp8`, `mxfp4` or `nvfp4`, all `:dynamic`. None: `x` as it is.
        out: tensor [.., N] of the dtype of `x` to write into; strided is allowed. Not differentiable.

    Raises:
        KernelInputError: an argument does not fit; nothing was written.
    """
    check_dtype("x", x, WEIGHT_DTYPES)
    if len(weight.shape) != 2:  # noqa: PLR2004
        raise KernelInputError("weight", f"shape {list(weight.shape)}", "a matrix [N, K]")
    encoded = encode_source(weight.data, weight.scale, weight.key, second_scale=weight.second_scale)
    if tuple(weight.shape) != tuple(encoded.shape):
        raise KernelInputError("weight.shape", str(list(weight.shape)), f"{list(encoded.shape)}, which the codes hold")
    if bias is not None:
        check_dtype("bias", bias, WEIGHT_DTYPES)
        check_device("bias", bias, x.device)
    word = activation_word(activation)
    if out is not None:
        check_device("out", out, x.device)
        read = {"x": x, "weight.data": weight.data, "weight.scale": weight.scale}
        check_disjoint({"out": out}, read if bias is None else {**read, "bias": bias})
    if _is_plain(x, bias):
        shape = output_shape(x, encoded, bias, word)
        if out is None:
            out = x.new_empty(shape)
        else:
            check_output("out", out, shape, (x.dtype,))
        run_linear(x, encoded, bias, word, out)
        return out
    codes = (encoded.data, encoded.scale, encoded.second, list(encoded.block), _ELEMENTS[encoded.data.dtype])
    if out is not None:
        torch.ops.quant_kernels.linear.out(x, *codes, bias, word, out=out)
        return out
    product: Tensor = torch.ops.quant_kernels.linear.default(x, *codes, bias, word)
    return product


def _is_plain(x: Tensor, bias: Tensor | None) -> bool:
    """Tell whether the product needs no operator: it is neither traced nor differentiated. An operator costs time."""
    if torch.compiler.is_compiling() or type(x) not in {Tensor, Parameter}:
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
