"""grouped_linear: rows sorted by expert times each expert's quantized weight, as one operator of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quant_kernels.nn.packed import PackedWeight
from quant_kernels.quantized_linear import linear
from quant_spec import QuantKey

if TYPE_CHECKING:
    from quant_kernels.quantized import QuantizedTensor


def grouped_linear(
    x: Tensor,
    offsets: Tensor,
    weight: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: QuantKey | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix: y[i] = x[i]·W[e(i)]ᵀ + b[e(i)].

    Experts without rows cost nothing; each of the others is decoded tile by tile, one after the other. The operator
    reads `offsets` back from the device.

    Args:
        x: [M, K], rows sorted by expert.
        offsets: int32 or int64 [E], where the rows of each expert end; rows behind the last are zero in the result.
        weight: stack [E, N, K].
        bias: [E, N] or None.
        activation: format that x is quantized to; None: it is not.

    Returns:
        [M, N] in x's dtype.
    """
    data, scale = weight.data.view(_bytes(weight.data)), weight.scale.view(_bytes(weight.scale))
    word = "" if activation is None else str(activation)
    shape = list(weight.shape)
    product: Tensor = _grouped(x, offsets, data, scale, weight.second_scale, bias, str(weight.key), shape, word)
    return product


def _bytes(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.element_size() > 1 else torch.uint8


@torch.library.custom_op("quant_kernels::grouped_linear", mutates_args=())
def _grouped(  # noqa: PLR0913, PLR0917  (the schema's arguments)
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None,
    bias: Tensor | None,
    key: str,
    shape: list[int],
    activation: str,
) -> Tensor:
    packed = PackedWeight(QuantKey.parse(key), (shape[1], shape[2]))
    inputs = QuantKey.parse(activation) if activation else None
    target = packed.target
    data, scale = data.view(target.op_data_dtype), scale.view(target.op_scale_dtype)
    out = x.new_zeros(x.shape[0], shape[1])
    first = 0
    for expert, past in enumerate(offsets.tolist()):
        if past > first:
            second = None if second_scale is None else second_scale[expert]
            each = packed.quantized(data[expert], scale[expert], second)
            added = None if bias is None else bias[expert]
            out[first:past] = linear(x[first:past], each, bias=added, activation=inputs)
        first = max(first, past)
    return out


@_grouped.register_fake
def _(  # noqa: PLR0913, PLR0917
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    second_scale: Tensor | None,
    bias: Tensor | None,
    key: str,
    shape: list[int],
    activation: str,
) -> Tensor:
    del offsets, data, scale, second_scale, bias, key, activation
    return x.new_empty(x.shape[0], shape[1])
