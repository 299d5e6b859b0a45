"""The conversion instructions for 4-, 8- and 16-bit floats, from tables of the formats' values.

e4m3 is the OCP format on gfx950 and FNUZ on gfx942. Inputs whose result AMD does not document (a NaN to e2m1, a scale
that is no normal number) give the code of -6, so that a kernel which uses one is seen to differ from the reference.
With FP16_OVFL = 0, the only mode modelled, what rounds above the greatest e4m3 value becomes NaN.
"""

# mypy: disable-error-code="no-any-return"
# (numpy types operators on arrays of any dtype as Any)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

U = np.uint32
D = np.float64
UNDOCUMENTED_E2M1 = 15


@dataclass(frozen=True)
class Format:
    """Magnitudes of a small float by code, without the sign."""

    magnitudes: NDArray[np.float64]
    nan: int | None
    negative_zero: bool

    @property
    def sign(self) -> int:
        """The sign bit."""
        return len(self.magnitudes) if self.nan in {None, len(self.magnitudes)} else len(self.magnitudes) + 1

    def nearest(self, magnitude: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the code of the nearest magnitude, ties to even; one past the last for what rounds above it."""
        greatest = self.magnitudes[-1]
        beyond = greatest + (greatest - self.magnitudes[-2])
        values = np.append(self.magnitudes, beyond)
        middles = (values[:-1] + values[1:]) / 2
        below = np.searchsorted(middles, magnitude, side="left")
        tie = magnitude == np.append(middles, np.inf)[below]
        return np.minimum(below + (tie & (below % 2 == 1)), len(self.magnitudes))


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> NDArray[np.float64]:
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    if exponent.max() >= 1 << exponent_bits:
        raise ValueError(f"{count} codes do not fit {exponent_bits} + {mantissa_bits} bits")
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


E4M3 = Format(_magnitudes(4, 3, 7, 127), nan=127, negative_zero=True)
E4M3_FNUZ = Format(_magnitudes(4, 3, 8, 128), nan=128, negative_zero=False)
E2M1 = Format(_magnitudes(2, 1, 1, 8), nan=None, negative_zero=True)


def e4m3_of(target: str) -> Format:
    """Return the format that the e4m3 instructions of a target mean."""
    return E4M3_FNUZ if target == "gfx942" else E4M3


def encode_e4m3(value: np.ndarray, target: str) -> np.ndarray:
    """Return the byte of each fp32 value."""
    form = e4m3_of(target)
    wide = np.asarray(value).astype(D)
    magnitude = np.abs(wide)
    code = form.nearest(np.where(np.isnan(wide), 0.0, magnitude))
    over = np.isnan(wide) | (code >= len(form.magnitudes))
    negative = np.signbit(wide) & ((code != 0) | form.negative_zero)
    signed = code | np.where(negative, 0x80, 0)
    if form.nan is None:
        raise ValueError("e4m3 has a NaN")
    nan = form.nan | np.where(np.signbit(wide) & form.negative_zero, 0x80, 0)
    return np.where(over, nan, signed).astype(np.uint32)


def decode_e4m3(code: np.ndarray, target: str) -> np.ndarray:
    """Return the fp32 value of each byte."""
    form = e4m3_of(target)
    table = np.full(256, np.nan, np.float32)
    count = len(form.magnitudes)
    table[:count] = form.magnitudes
    table[128 : 128 + count] = -table[:count]
    if not form.negative_zero:
        table[128] = np.nan
    return table[np.asarray(code) & U(0xFF)]


def encode_e2m1(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the code of each fp32 value / 2^(exponent of the scale), saturated."""
    wide = np.asarray(value).astype(D)
    exponent = (np.asarray(scale, np.float32).view(np.uint32) >> U(23)) & U(0xFF)
    scaled = wide * 2.0 ** (127.0 - exponent.astype(D))
    code = np.minimum(E2M1.nearest(np.abs(np.nan_to_num(scaled, nan=0.0, posinf=1e300, neginf=-1e300))), 7)
    signed = code | np.where(np.signbit(wide), 8, 0)
    documented = ~np.isnan(wide) & (exponent > 0) & (exponent < 255)
    return np.where(documented, signed, UNDOCUMENTED_E2M1).astype(np.uint32)


def decode_e2m1(code: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the fp32 value of each code times 2^(exponent of the scale - 127)."""
    exponent = (np.asarray(scale, np.float32).view(np.uint32) >> U(23)) & U(0xFF)
    magnitude = E2M1.magnitudes[np.asarray(code) & U(7)]
    signed = np.where(np.asarray(code) & U(8), -magnitude, magnitude)
    return (signed * 2.0 ** (exponent.astype(D) - 127.0)).astype(np.float32)


def encode_bf16(value: np.ndarray) -> np.ndarray:
    """Return the bits of each fp32 value rounded to bf16."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> U(16)) & U(1))) >> np.uint64(16)
    quiet = (bits >> U(16)) | U(0x40)
    return np.where(np.isnan(value), quiet, rounded.astype(np.uint32)).astype(np.uint32)
