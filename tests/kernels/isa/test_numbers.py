"""The interpreter's arithmetic against exact arithmetic and against ml_dtypes: an oracle must be right itself."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from amdgcn.floats import div_fixup, div_fmas, div_scale, fma, maximum, middle, minimum, reciprocal
from amdgcn.integers import INTEGERS, field_i, leading_zeros, permute_bytes, reverse
from amdgcn.small_floats import decode_e2m1, decode_e4m3, encode_bf16, encode_e2m1, encode_e4m3

if TYPE_CHECKING:
    from collections.abc import Iterator

F = np.float32
RANDOM = np.random.default_rng(0)
SPECIAL = np.array(
    [0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Overflows and NaNs are wanted."""
    with np.errstate(all="ignore"):
        yield


def patterns(count: int) -> np.ndarray:
    """Random fp32 patterns of every exponent, and special ones."""
    bits = RANDOM.integers(0, 2**32, count, np.uint32)
    return np.concatenate([SPECIAL, bits]).view(F)


def test_fma_is_rounded_once() -> None:
    # Near cancellations and halfway cases, where two roundings differ from one.
    a = (RANDOM.integers(2**23, 2**24, 20000) * 2.0**-23).astype(F)
    b = (RANDOM.integers(2**23, 2**24, 20000) * 2.0**-23).astype(F)
    c = (-(a.astype(np.float64) * b) + RANDOM.integers(-3, 4, 20000) * 2.0**-24).astype(F)
    c[::2] = (RANDOM.standard_normal(10000) * 2.0 ** RANDOM.integers(-60, 60, 10000)).astype(F)
    found = fma(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(got)) - exact)
        for neighbour in (np.nextafter(got, F(np.inf)), np.nextafter(got, F(-np.inf))):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and int(got.view(np.uint32)) % 2 == 0)


def divide(numerator: np.ndarray, denominator: np.ndarray, error: int) -> np.ndarray:
    """The sequence that the compiler makes of a division."""
    scaled_denominator, _ = div_scale(denominator, denominator, numerator)
    scaled_numerator, flag = div_scale(numerator, denominator, numerator)
    inverse = reciprocal(error)(scaled_denominator)
    inverse = fma(fma(-scaled_denominator, inverse, F(1)), inverse, inverse)
    quotient = scaled_numerator * inverse
    quotient = fma(fma(-scaled_denominator, quotient, scaled_numerator), inverse, quotient)
    remainder = fma(-scaled_denominator, quotient, scaled_numerator)
    return div_fixup(div_fmas(remainder, inverse, quotient, flag), denominator, numerator)


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_division_is_ieee_whatever_the_reciprocal(error: int) -> None:
    numerator, denominator = patterns(100_000), RANDOM.permutation(patterns(100_000))
    found, wanted = divide(numerator, denominator, error), numerator / denominator
    both = np.isnan(found) & np.isnan(wanted)
    assert np.array_equal(found.view(np.uint32)[~both], wanted.view(np.uint32)[~both])


def test_orders_of_floats() -> None:
    zero, minus, nan, one = F(0), F(-0.0), F(np.nan), F(1)
    assert not np.signbit(maximum(zero, minus))
    assert np.signbit(minimum(zero, minus))
    assert maximum(nan, one) == one
    assert minimum(one, nan) == one
    assert np.isnan(maximum(nan, nan))
    assert middle(F(3), F(1), F(2)) == F(2)
    assert middle(F(np.inf), F(-448), F(448)) == F(448)
    assert middle(nan, F(-448), F(448)) == F(-448)


def test_e4m3_equals_ml_dtypes() -> None:
    values = patterns(200_000)
    finite = values[np.abs(values) <= 464]
    wanted = finite.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(encode_e4m3(finite, "gfx950"), wanted)
    finite = values[np.abs(values) < 248]
    wanted = finite.astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)
    assert np.array_equal(encode_e4m3(finite, "gfx942"), wanted)
    codes = np.arange(256, dtype=np.uint8)
    for target, dtype in (("gfx950", ml_dtypes.float8_e4m3fn), ("gfx942", ml_dtypes.float8_e4m3fnuz)):
        assert np.array_equal(decode_e4m3(codes.astype(np.uint32), target), codes.view(dtype).astype(F), equal_nan=True)


def test_e4m3_beyond_the_range_is_nan() -> None:
    beyond = np.array([465, -465, np.inf, np.nan], F)
    assert encode_e4m3(beyond, "gfx950").tolist() == [0x7F, 0xFF, 0x7F, 0x7F]
    assert encode_e4m3(np.array([248, -1e9, np.nan], F), "gfx942").tolist() == [0x80, 0x80, 0x80]
    assert encode_e4m3(np.array([-0.0], F), "gfx942").tolist() == [0]


def test_e2m1_equals_ml_dtypes() -> None:
    values = np.concatenate([patterns(50_000), np.arange(-8, 8, 0.125, F)])
    values = values[~np.isnan(values)]
    wanted = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert np.array_equal(encode_e2m1(values, F(1)), wanted)
    assert np.array_equal(encode_e2m1(values * F(4), F(4)), encode_e2m1(values * F(4) / F(4), F(1)))
    codes = np.arange(16, dtype=np.uint32)
    assert np.array_equal(
        decode_e2m1(codes, F(0.5)), codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F) / 2
    )


def test_what_amd_does_not_document_is_seen() -> None:
    assert encode_e2m1(np.array([np.nan, 1.0], F), np.array([1.0, 1e-40], F)).tolist() == [15, 15]


def test_bf16_equals_ml_dtypes() -> None:
    values = patterns(100_000)
    values = values[~np.isnan(values)]
    assert np.array_equal(encode_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_integers() -> None:
    words = RANDOM.integers(0, 2**32, 500, np.uint32)
    for word, zeros, backwards in zip(words, leading_zeros(words), reverse(words), strict=True):
        assert int(zeros) == 32 - int(word).bit_length()
        assert int(backwards) == int(f"{int(word):032b}"[::-1], 2)
    assert int(leading_zeros(np.uint32(0))) == 0xFFFFFFFF
    assert int(permute_bytes(np.uint32(0x8877_6655), np.uint32(0x4433_2211), np.uint32(0x0C0B_0700))) == 0x00FF_8811
    assert int(field_i(np.uint32(0xF0), np.uint32(4), np.uint32(4)).astype(np.int32)) == -1
    total, carry = INTEGERS["v_add_co_u32"][1](np.uint32(0xFFFFFFFF), np.uint32(1))
    assert (int(total), bool(carry)) == (0, True)
    total, borrow = INTEGERS["v_subb_co_u32"][1](np.uint32(0), np.uint32(0), np.bool_(1))
    assert (int(total), bool(borrow)) == (0xFFFFFFFF, True)
