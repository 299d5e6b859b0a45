"""linear: the product of an activation with a quantized weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quant_kernels import linear_ops as _linear_ops  # noqa: F401  (registers the operators)
from quant_kernels.activations import activation_word
from quant_kernels.checks import WEIGHT_DTYPES, KernelInputError, check_device, check_disjoint, check_dtype
from quant_kernels.encodings import encode_source

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
    arguments = (
        x,
        encoded.data,
        encoded.scale,
        encoded.second,
        list(encoded.block),
        _ELEMENTS[encoded.data.dtype],
        bias,
        activation_word(activation),
    )
    if out is None:
        product: Tensor = torch.ops.quant_kernels.linear.default(*arguments)
        return product
    check_device("out", out, x.device)
    read = {"x": x, "weight.data": weight.data, "weight.scale": weight.scale}
    check_disjoint({"out": out}, read if bias is None else {**read, "bias": bias})
    torch.ops.quant_kernels.linear.out(*arguments, out=out)
    return out
