"""amax: the greatest magnitudes that scales are made from, as a function on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.arguments import check_destination, check_float, check_quantized, check_tensor, check_type
from quant_kernels.checks import (
    WEIGHT_DTYPES,
    KernelInputError,
    check_choice,
    check_device,
    check_disjoint,
    check_dtype,
    check_output,
    check_rank,
)
from quant_kernels.encodings import Encoded, encode_source
from quant_kernels.launch import run_amax, source_device, source_shape
from quant_kernels.quantized import QuantizedTensor

if TYPE_CHECKING:
    from quant_kernels.launch import Source

_BLOCKS: Final = {"row": (1, 0), "1x16": (1, 16), "1x32": (1, 32), "128x128": (128, 128), "tensor": (0, 0)}


def amax(
    w: Tensor | QuantizedTensor,
    granularity: str,
    *,
    through: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Return the greatest magnitude of each row, group, block or matrix of a weight [.., N, K] as fp32.

    What the ranks of a tensor-parallel group reduce with `max` before each quantizes its shard with `amax=`. NaN where
    a NaN is. A group or block at an edge may be partial.

    Args:
        w: float32, float16 or bfloat16; or a quantized weight, whose values are rounded to `through`.
        granularity: `row` gives [.., N, 1]; `1x16` [.., N, ⌈K/16⌉]; `1x32` [.., N, ⌈K/32⌉]; `128x128`
            [.., ⌈N/128⌉, ⌈K/128⌉]; `tensor` [..] (0-d for 2-D weights).
        through: for quantized weights, the dtype that re-quantization passes through.
        out: contiguous fp32 tensor of that shape to write into.

    Raises:
        KernelInputError: an argument does not fit; nothing was written.
    """
    source: Source
    check_float("through", through)
    if isinstance(w, QuantizedTensor):
        q = check_quantized("w", w)
        source = encode_source(q.data, q.scale, q.key, second_scale=q.second_scale)
    else:
        source = check_tensor("w", check_type("w", w, Tensor, "a tensor, or a QuantizedTensor"))
        check_rank("w", source)
        check_dtype("w", source, WEIGHT_DTYPES)
    check_choice("granularity", granularity, tuple(_BLOCKS))
    rows, cols = _BLOCKS[granularity]
    shape_of_source = source_shape(source)
    lead, (n, k) = shape_of_source[:-2], shape_of_source[-2:]
    tiles = (-(-n // rows) if rows else 1, -(-k // cols) if cols else 1)
    shape = lead if granularity == "tensor" else (*lead, *tiles)
    device = source_device(source)
    if out is None:
        out = torch.empty(shape, device=device)
    else:
        out = check_destination("out", out)
        check_device("out", out, device)
        check_output("out", out, shape, (torch.float32,))
        check_disjoint({"out": out}, _read(source))
        if not out.is_contiguous():
            raise KernelInputError("out", f"strides {list(out.stride())}", "a contiguous tensor")
    if 0 in shape_of_source:
        return out.zero_()
    run_amax(source, out, (rows or n, cols or k), through)
    return out


def _read(source: Source) -> dict[str, Tensor]:
    if not isinstance(source, Encoded):
        return {"w": source}
    read = {"w.data": source.data, "w.scale": source.scale}
    return read if source.second is None else {**read, "w.second_scale": source.second}
