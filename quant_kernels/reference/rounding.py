"""Rounding of fp32 values to 8-bit and 4-bit codes, and of block maxima to power-of-two scales.

Everything here is to nearest, ties to even, saturating. Inf saturates like any large value; NaN becomes the format's
NaN (0x7F, FNUZ 0x80) or, for e2m1 which has none, the code 7. Formulas: OCP 8-bit floating point (OFP8) and OCP
Microscaling (MX) v1.0.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

E4M3_MAX: Final = 448.0
E4M3FNUZ_MAX: Final = 240.0
E2M1_MAX: Final = 6.0
TINY_SCALE: Final = 2.0**-126
"""Least scale of a block that is not all zero: the least normal fp32, so that dividing by it is exact enough."""

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_BYTE: Final = 255
_EXPONENT_BITS: Final = 0x7F800000
# Half of the last code's step, and one bit below the next power of two, in fp32 mantissa bits: what is added to the
# bits of a maximum before its exponent is cut out.
_ROUNDING_BITS: Final = {
    ("even", 4): 1 << 21,
    ("even", 8): 1 << 19,
    ("floor", 4): 0,
    ("floor", 8): 0,
    ("rceil", 4): 0x3FFFFF,
    ("rceil", 8): 0x1FFFFF,
}
_MAX_EXPONENT: Final = {4: 2, 8: 8}


def encode_e4m3(values: Tensor) -> Tensor:
    """Round fp32 `values` to float8_e4m3fn of the same shape: ±448 at most, NaN becomes 0x7F."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e4m3fnuz(values: Tensor) -> Tensor:
    """Round fp32 `values` to float8_e4m3fnuz of the same shape: ±240 at most, −0 becomes +0, NaN becomes 0x80."""
    codes = values.clamp(-E4M3FNUZ_MAX, E4M3FNUZ_MAX).to(torch.float8_e4m3fnuz).view(torch.uint8)
    return torch.where(values.isnan(), 0x80, codes).to(torch.uint8).view(torch.float8_e4m3fnuz)


def encode_e2m1(values: Tensor) -> Tensor:
    """Round fp32 `values` to e2m1 codes 0 … 15 (uint8, one a byte): ±6 at most, NaN becomes 7."""
    size = values.abs()
    # One comparison a boundary between neighbouring codes; the boundary itself goes to the even code.
    codes = (size > 0.25).to(torch.uint8)  # noqa: PLR2004  (the boundaries are halves of neighbouring values)
    for boundary, inclusive in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += (size >= boundary) if inclusive else (size > boundary)
    signed = codes | (values.signbit().to(torch.uint8) << 3)
    return torch.where(values.isnan(), 7, signed).to(torch.uint8)


def grouped(tensor: Tensor, group: int) -> Tensor:
    """Return [.., K] as [.., K/group, group]."""
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // group, group)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack codes [.., K] two a byte, element 2i in the low nibble, into float4_e2m1fn_x2 [.., K/2]."""
    pairs = grouped(codes, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().view(torch.float4_e2m1fn_x2)


def unpack_e2m1(data: Tensor) -> Tensor:
    """Return the values of packed codes [.., K/2] (float4_e2m1fn_x2 or uint8) as fp32 [.., K]."""
    packed = data.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int64)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=data.device)
    values: Tensor = table[codes]
    return values


def power_of_two_bytes(amax: Tensor, element_bits: int, rounding: str) -> Tensor:
    """Return the E8M0 byte (uint8) of each block maximum (fp32, not negative), 255 for NaN and Inf.

    Args:
        amax: greatest magnitude of each block.
        element_bits: 4 for e2m1, 8 for e4m3.
        rounding: `even` (rounds the maximum to the element's mantissa first), `floor` or `rceil` (the smallest
            power of two that keeps the maximum within the element's range).
    """
    bits = amax.contiguous().view(torch.int32).to(torch.int64)
    exponent = (bits + _ROUNDING_BITS[rounding, element_bits]) >> 23
    byte = (exponent - _MAX_EXPONENT[element_bits]).clamp(min=0)
    return torch.where(bits >= _EXPONENT_BITS, _NAN_BYTE, byte).to(torch.uint8)


def power_of_two(byte: Tensor) -> Tensor:
    """Return 2^(byte − 127) in fp32 for E8M0 bytes (uint8 or float8_e8m0fnu); NaN for 255."""
    exponent = byte.view(torch.uint8).to(torch.int32)
    # Byte 0 is 2^-127, a subnormal: its bits are a half of the least normal number's.
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23).to(torch.int32)
    return torch.where(exponent == _NAN_BYTE, torch.nan, bits.view(torch.float32))


def inverse_power_of_two(byte: Tensor) -> Tensor:
    """Return 2^(127 − byte) in fp32, the exact inverse of a scale; for 255, by the same formula, 2^-128."""
    exponent = byte.view(torch.uint8).to(torch.int32)
    normal = (254 - exponent).clamp(min=0) << 23
    subnormal = torch.where(exponent == _NAN_BYTE, 0x00200000, 0x00400000).to(torch.int32)
    return torch.where(exponent >= 254, subnormal, normal).to(torch.int32).view(torch.float32)  # noqa: PLR2004
