"""Vector instructions on floats: arithmetic rounded to nearest even with subnormals kept, division steps, conversions.

Division steps follow the pseudocode of the CDNA3 instruction set document, corrected where the sequence that uses them
could not be right otherwise: V_DIV_FMAS_F32 multiplies by 2^64 or 2^-64 (the document prints 2^32), and a denominator
above 2^126 under a subnormal quotient is scaled down (the document prints up, which overflows).
"""

# mypy: disable-error-code="no-any-return"
# (numpy types operators on arrays of any dtype as Any)

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from amdgcn.integers import Table

U = np.uint32
F = np.float32
D = np.float64
INFINITY = U(0x7F800000)


def _bits(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, F).view(np.uint32)


def _magnitude(value: np.ndarray) -> np.ndarray:
    return _bits(value) & U(0x7FFFFFFF)


def _exponent(value: np.ndarray) -> np.ndarray:
    return ((_bits(value) >> U(23)) & U(0xFF)).astype(np.int64)


def _to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round a double that stands for total + error to odd: rounding it once more to fp32 is then exact."""
    bits = np.asarray(total, D).view(np.int64)
    away = (error > 0) == (total > 0)
    moved = np.where(away, bits + 1, bits - 1)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & ((bits & 1) == 0)
    return np.where(inexact, moved, bits).view(D)


def exact_product_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of fp32 values as a double rounded to odd (the product is exact, the sum by Knuth's two-sum)."""
    product = np.asarray(a).astype(D) * np.asarray(b).astype(D)
    addend = np.asarray(c).astype(D)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    return _to_odd(total, error)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """V_FMA_F32: a * b + c, rounded once."""
    return exact_product_sum(a, b, c).astype(F)


def _fma_double(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    shape = np.broadcast(a, b, c)
    out = np.empty(shape.shape, D)
    flat = out.reshape(-1)
    for index, values in enumerate(shape):
        x, y, z = (float(value) for value in values)
        product = x * y
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)) or (product == 0 and z == 0):
            flat[index] = product + z
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        # Fraction to float rounds once, to nearest even; an exact zero of two terms is +0.
        flat[index] = float(exact) if exact else 0.0
    return out


def rounded(value: np.ndarray) -> np.ndarray:
    """V_RNDNE_F32."""
    return np.rint(value)


def _quiet(value: np.ndarray) -> np.ndarray:
    return (_bits(value) | U(0x00400000)).view(F)


def _extreme(a: np.ndarray, b: np.ndarray, *, greater: bool) -> np.ndarray:
    """Minimum or maximum of IEEE mode: a number beats a NaN, -0 is below +0."""
    a, b = np.broadcast_arrays(np.asarray(a, F), np.asarray(b, F))
    first = (a > b) | ((a == b) & (_bits(a) < _bits(b))) if greater else (a < b) | ((a == b) & (_bits(a) > _bits(b)))
    chosen = np.where(first, a, b)
    chosen = np.where(np.isnan(a), b, np.where(np.isnan(b), a, chosen))
    return np.where(np.isnan(a) & np.isnan(b), _quiet(a), chosen)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """V_MIN_F32."""
    return _extreme(a, b, greater=False)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """V_MAX_F32."""
    return _extreme(a, b, greater=True)


def middle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """V_MED3_F32: the minimum of the three if one is NaN."""
    low = minimum(minimum(a, b), c)
    median = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, median)


# ---- division --------------------------------------------------------------------------------------------------------


def div_scale(value: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V_DIV_SCALE_F32: one of numerator and denominator, scaled so that no step of the division leaves the range."""
    value, denominator, numerator = np.broadcast_arrays(*(np.asarray(x, F) for x in (value, denominator, numerator)))
    up, down = np.ldexp(value, 64), np.ldexp(value, -64)
    least = D(2.0**-126)
    quotient = np.abs(numerator.astype(D) / denominator.astype(D))
    inverse = np.abs(1.0 / denominator.astype(D))
    quotient_small = (quotient != 0) & (quotient < least)
    inverse_small = (inverse != 0) & (inverse < least)
    is_denominator = _bits(value) == _bits(denominator)
    is_numerator = _bits(value) == _bits(numerator)
    zero = (numerator == 0) | (denominator == 0)
    far = _exponent(numerator) - _exponent(denominator) >= 96
    subnormal = (_exponent(denominator) == 0) & (denominator != 0)
    cases = [zero, far, subnormal, inverse_small & quotient_small, inverse_small, quotient_small]
    tiny = _exponent(numerator) <= 23
    scaled = np.select(
        [*cases, tiny],
        [
            np.full_like(value, np.nan),
            np.where(is_denominator, up, value),
            up,
            np.where(is_denominator, down, value),
            down,
            np.where(is_numerator, up, value),
            up,
        ],
        value,
    )
    flag = np.select(cases, [np.False_, np.True_, np.False_, np.True_, np.False_, np.True_], np.False_)
    return scaled, flag


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray, flag: np.ndarray) -> np.ndarray:
    """V_DIV_FMAS_F32: a * b + c, and the scaling of V_DIV_SCALE_F32 undone where its flag is set; rounded once."""
    exact = exact_product_sum(a, b, c)
    factor = np.where(_exponent(c) > 127, D(2.0**64), D(2.0**-64))
    return np.where(flag, exact * factor, exact).astype(F)


def div_fixup(quotient: np.ndarray, denominator: np.ndarray, numerator: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP_F32: the sign, and the special cases of a quotient."""
    quotient, denominator, numerator = np.broadcast_arrays(
        *(np.asarray(x, F) for x in (quotient, denominator, numerator))
    )
    sign = (_bits(denominator) ^ _bits(numerator)) & U(0x80000000)
    top, bottom = _magnitude(numerator), _magnitude(denominator)
    infinite = (INFINITY | sign).view(F)
    nothing = sign.view(F)
    distance = _exponent(numerator) - _exponent(denominator)
    indefinite = np.full_like(quotient, U(0xFFC00000).view(F))
    result = (_magnitude(quotient) | sign).view(F)
    result = np.where(np.isnan(quotient), infinite, result)
    return np.select(
        [
            top > INFINITY,
            bottom > INFINITY,
            (top == 0) & (bottom == 0),
            (top == INFINITY) & (bottom == INFINITY),
            (bottom == 0) | (top == INFINITY),
            (bottom == INFINITY) | (top == 0),
            distance < -150,
        ],
        [_quiet(numerator), _quiet(denominator), indefinite, indefinite, infinite, nothing, nothing],
        result,
    ).astype(F)


def reciprocal(error: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return V_RCP_F32 with `error` units in the last place added: the hardware's own error is at most one."""

    def rcp(value: np.ndarray) -> np.ndarray:
        exact = (D(1.0) / np.asarray(value).astype(D)).astype(F)
        bits = _bits(exact)
        exponent = (bits >> U(23)) & U(0xFF)
        ordinary = (exponent > 1) & (exponent < 254)
        moved = (bits.astype(np.int64) + error).astype(np.uint32).view(F)
        # A power of two has an exact reciprocal.
        return np.where(ordinary & ((bits & U(0x7FFFFF)) != 0), moved, exact)

    return rcp


# ---- conversions -----------------------------------------------------------------------------------------------------


def _to_integer(low: float, high: float, dtype: type[np.generic]) -> Callable[[np.ndarray], np.ndarray]:
    def convert(value: np.ndarray) -> np.ndarray:
        inside = np.clip(
            np.trunc(np.nan_to_num(np.asarray(value).astype(D), nan=0.0, posinf=high, neginf=low)), low, high
        )
        return inside.astype(np.int64).astype(dtype)

    return convert


def _byte(index: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda value: ((value >> U(8 * index)) & U(0xFF)).astype(F)


def _class_test(value: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """V_CMP_CLASS_F32: bit per class of sNaN, qNaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf."""
    bits, magnitude = _bits(value), _magnitude(value)
    negative = bits >= U(0x80000000)
    number = np.select(
        [magnitude > INFINITY, magnitude == INFINITY, magnitude >= U(0x00800000), magnitude > 0],
        [
            np.where(bits & U(0x00400000), 1, 0),
            np.where(negative, 2, 9),
            np.where(negative, 3, 8),
            np.where(negative, 4, 7),
        ],
        np.where(negative, 5, 6),
    )
    return ((wanted >> number.astype(np.uint32)) & U(1)).astype(np.bool_)


FLOATS: Table = {
    "v_add_f32": ("f:ff", lambda a, b: a + b),
    "v_sub_f32": ("f:ff", lambda a, b: a - b),
    "v_subrev_f32": ("f:ff", lambda a, b: b - a),
    "v_mul_f32": ("f:ff", lambda a, b: a * b),
    "v_fma_f32": ("f:fff", fma),
    "v_fmac_f32": ("f:ff+", fma),
    "v_fmaak_f32": ("f:fff", fma),
    "v_fmamk_f32": ("f:fff", fma),
    "v_min_f32": ("f:ff", minimum),
    "v_max_f32": ("f:ff", maximum),
    "v_med3_f32": ("f:fff", middle),
    "v_max3_f32": ("f:fff", lambda a, b, c: maximum(maximum(a, b), c)),
    "v_min3_f32": ("f:fff", lambda a, b, c: minimum(minimum(a, b), c)),
    "v_div_scale_f32": ("fm:fff", div_scale),
    "v_div_fixup_f32": ("f:fff", div_fixup),
    "v_ldexp_f32": ("f:fi", lambda a, b: np.ldexp(a.astype(D), b).astype(F)),
    "v_rndne_f32": ("f:f", rounded),
    "v_trunc_f32": ("f:f", np.trunc),
    "v_floor_f32": ("f:f", np.floor),
    "v_ceil_f32": ("f:f", np.ceil),
    "v_cmp_class_f32": ("m:fu", _class_test),
    "v_add_f64": ("F:FF", lambda a, b: a + b),
    "v_mul_f64": ("F:FF", lambda a, b: a * b),
    "v_fma_f64": ("F:FFF", _fma_double),
    "v_fmac_f64": ("F:FF+", _fma_double),
    # conversions
    "v_cvt_f32_u32": ("f:u", lambda a: a.astype(F)),
    "v_cvt_f32_i32": ("f:i", lambda a: a.astype(F)),
    "v_cvt_u32_f32": ("u:f", _to_integer(0.0, float(2**32 - 1), np.uint32)),
    "v_cvt_i32_f32": ("i:f", _to_integer(float(-(2**31)), float(2**31 - 1), np.int32)),
    "v_cvt_f64_f32": ("F:f", lambda a: a.astype(D)),
    "v_cvt_f32_f64": ("f:F", lambda a: a.astype(F)),
    "v_cvt_f64_u32": ("F:u", lambda a: a.astype(D)),
    "v_cvt_f64_i32": ("F:i", lambda a: a.astype(D)),
    "v_cvt_f32_f16": ("f:h", lambda a: a.astype(F)),
    "v_cvt_f16_f32": ("h:f", lambda a: a.astype(np.float16)),
}
FLOATS |= {f"v_cvt_f32_ubyte{index}": ("f:u", _byte(index)) for index in range(4)}

# On pairs of registers: each half chosen by op_sel and op_sel_hi.
PACKED_FLOATS: Table = {
    "v_pk_add_f32": ("f:ff", lambda a, b: a + b),
    "v_pk_mul_f32": ("f:ff", lambda a, b: a * b),
    "v_pk_fma_f32": ("f:fff", fma),
}
