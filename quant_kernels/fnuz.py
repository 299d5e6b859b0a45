"""FP8 codes of OCP (e4m3fn) read by hardware that knows only FNUZ (e4m3fnuz, gfx942): same bytes, twice the scale."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quant_kernels.arguments import check_tensor
from quant_kernels.checks import check_dtype

_MAGNITUDE: Final = 0x7F
_OCP_NAN: Final = 0x7F
_SIGN: Final = 0x80
"""OCP's −0, and FNUZ's only NaN."""


def e4m3fn_to_e4m3fnuz(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3fn codes and their scales as e4m3fnuz codes and scales of the same values.

    The exponent bias of FNUZ is one more, so a byte means half as much there and the scale doubles. Two codes differ:
    −0 (0x80) becomes +0 (0x00), NaN (0x7F, 0xFF) becomes 0x80.

    Args:
        data: float8_e4m3fn of any shape.
        scale: fp32 scales, of any shape.

    Returns:
        float8_e4m3fnuz of the shape of `data`, and fp32 scales of the shape of `scale`.

    Raises:
        KernelInputError: a dtype is another.
    """
    data, scale = check_tensor("data", data), check_tensor("scale", scale)
    check_dtype("data", data, (torch.float8_e4m3fn,))
    check_dtype("scale", scale, (torch.float32,))
    codes = data.view(torch.uint8)
    codes = codes.masked_fill(codes == _SIGN, 0).masked_fill((codes & _MAGNITUDE) == _OCP_NAN, _SIGN)
    return codes.view(torch.float8_e4m3fnuz), scale * 2
