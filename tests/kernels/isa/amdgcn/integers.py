"""Vector instructions on integers and bits: name -> signature and function of numpy arrays.

A signature is "destinations:sources" in the letters of `registers`; a trailing `+` passes the old destination as the
last source. Functions see numpy's wrapping arithmetic.
"""

# mypy: disable-error-code="no-any-return"
# (numpy types operators on arrays of any dtype as Any)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]
Table = dict[str, tuple[str, Function]]

U = np.uint32
L = np.uint64


def _wide(value: np.ndarray) -> np.ndarray:
    return np.asarray(value).astype(np.uint64)


def _signed_wide(value: np.ndarray) -> np.ndarray:
    return np.asarray(value).astype(np.int64)


def add_with_carry(a: np.ndarray, b: np.ndarray, carry: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of 32 bits and its carry."""
    total = _wide(a) + _wide(b) + _wide(np.asarray(carry))
    return total.astype(np.uint32), total > 0xFFFFFFFF


def subtract_with_borrow(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the difference of 32 bits and its borrow."""
    total = _signed_wide(a) - _signed_wide(b) - _signed_wide(np.asarray(borrow))
    return total.astype(np.uint32), total < 0


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """V_PERM_B32: bytes of {a, b} chosen by each byte of the selector; 8 ... 11 copy a sign, 12 is 0, above is 0xFF."""
    both = (_wide(a) << L(32)) | _wide(b)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint64)
    for position in range(4):
        choice = (_wide(selector) >> L(8 * position)) & L(0xFF)
        picked = (both >> (L(8) * (choice & L(7)))) & L(0xFF)
        sign = (both >> (L(16) * (choice & L(3)) + L(15))) & L(1)
        byte = np.where(
            choice < 8, picked, np.where(choice < 12, sign * L(0xFF), np.where(choice == 12, L(0), L(0xFF)))
        )
        result |= byte << L(8 * position)
    return result.astype(np.uint32)


def field_u(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """V_BFE_U32."""
    mask = (L(1) << _wide(width & U(31))) - L(1)
    return ((_wide(value) >> _wide(offset & U(31))) & mask).astype(np.uint32)


def field_i(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """V_BFE_I32."""
    found = _wide(field_u(value, offset, width))
    bits = _wide(width & U(31))
    sign = (L(1) << bits) >> L(1)
    return ((found ^ sign) - sign).astype(np.uint32)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the middle one of three integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def leading_zeros(value: np.ndarray) -> np.ndarray:
    """V_FFBH_U32: zeros above the highest set bit, all ones for 0."""
    found = np.floor(np.log2(np.maximum(_wide(value), L(1)).astype(np.float64))).astype(np.uint32)
    return np.where(np.asarray(value) == 0, U(0xFFFFFFFF), U(31) - found)


def reverse(value: np.ndarray) -> np.ndarray:
    """V_BFREV_B32."""
    found = np.asarray(value)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        found = ((found >> U(shift)) & U(mask)) | ((found & U(mask)) << U(shift))
    return found


def _mul_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ((_wide(a) * _wide(b)) >> L(32)).astype(np.uint32)


def _mul_high_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ((_signed_wide(a) * _signed_wide(b)) >> np.int64(32)).astype(np.int32)


def _low24(value: np.ndarray) -> np.ndarray:
    return value & U(0xFFFFFF)


def _align(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return (((_wide(a) << L(32)) | _wide(b)) >> _wide(shift)).astype(np.uint32)


def _mad64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    product = _wide(a) * _wide(b)
    total = product + c
    return total, total < product


def _mad64_signed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    product = _signed_wide(a) * _signed_wide(b)
    total = product + c
    return total, (total < product) != (c < 0)


INTEGERS: Table = {
    "v_mov_b32": ("u:u", lambda a: a),
    "v_mov_b64": ("U:U", lambda a: a),
    "v_not_b32": ("u:u", lambda a: ~a),
    "v_bfrev_b32": ("u:u", reverse),
    "v_ffbh_u32": ("u:u", leading_zeros),
    "v_ffbl_b32": (
        "u:u",
        lambda a: np.where(a == 0, U(0xFFFFFFFF), U(31) - leading_zeros(a & (~a + U(1)))),
    ),
    "v_bcnt_u32_b32": ("u:uu", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b),
    "v_cndmask_b32": ("u:uum", lambda a, b, m: np.where(m, b, a)),
    "v_and_b32": ("u:uu", lambda a, b: a & b),
    "v_or_b32": ("u:uu", lambda a, b: a | b),
    "v_xor_b32": ("u:uu", lambda a, b: a ^ b),
    "v_xnor_b32": ("u:uu", lambda a, b: ~(a ^ b)),
    "v_or3_b32": ("u:uuu", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u:uuu", lambda a, b, c: (a & b) | c),
    "v_bfi_b32": ("u:uuu", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u:uuu", field_u),
    "v_bfe_i32": ("u:uuu", field_i),
    "v_bfm_b32": ("u:uu", lambda a, b: ((U(1) << (a & U(31))) - U(1)) << (b & U(31))),
    "v_perm_b32": ("u:uuu", permute_bytes),
    "v_alignbit_b32": ("u:uuu", lambda a, b, c: _align(a, b, c & U(31))),
    "v_alignbyte_b32": ("u:uuu", lambda a, b, c: _align(a, b, (c & U(3)) * U(8))),
    # additions
    "v_add_u32": ("u:uu", lambda a, b: a + b),
    "v_sub_u32": ("u:uu", lambda a, b: a - b),
    "v_subrev_u32": ("u:uu", lambda a, b: b - a),
    "v_add3_u32": ("u:uuu", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u:uuu", lambda a, b, c: (a ^ b) + c),
    "v_add_co_u32": ("um:uu", add_with_carry),
    "v_addc_co_u32": ("um:uum", add_with_carry),
    "v_sub_co_u32": ("um:uu", subtract_with_borrow),
    "v_subb_co_u32": ("um:uum", subtract_with_borrow),
    "v_subrev_co_u32": ("um:uu", lambda a, b: subtract_with_borrow(b, a)),
    "v_subbrev_co_u32": ("um:uum", lambda a, b, c: subtract_with_borrow(b, a, c)),
    "v_add_u16": ("H:HH", lambda a, b: a + b),
    "v_sub_u16": ("H:HH", lambda a, b: a - b),
    "v_subrev_u16": ("H:HH", lambda a, b: b - a),
    # shifts
    "v_lshlrev_b32": ("u:uu", lambda a, b: b << (a & U(31))),
    "v_lshrrev_b32": ("u:uu", lambda a, b: b >> (a & U(31))),
    "v_ashrrev_i32": ("i:ui", lambda a, b: b >> (a & U(31)).astype(np.int32)),
    "v_lshlrev_b64": ("U:uU", lambda a, b: b << _wide(a & U(63))),
    "v_lshrrev_b64": ("U:uU", lambda a, b: b >> _wide(a & U(63))),
    "v_ashrrev_i64": ("I:uI", lambda a, b: b >> _signed_wide(a & U(63))),
    "v_lshlrev_b16": ("H:HH", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": ("H:HH", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": ("J:JJ", lambda a, b: b >> (a & np.int16(15))),
    "v_lshl_add_u32": ("u:uuu", lambda a, b, c: (a << (b & U(31))) + c),
    "v_add_lshl_u32": ("u:uuu", lambda a, b, c: (a + b) << (c & U(31))),
    "v_lshl_or_b32": ("u:uuu", lambda a, b, c: (a << (b & U(31))) | c),
    "v_lshl_add_u64": ("U:UuU", lambda a, b, c: (a << _wide(b & U(7))) + c),
    # products
    "v_mul_lo_u32": ("u:uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("u:uu", _mul_high),
    "v_mul_hi_i32": ("i:ii", _mul_high_signed),
    "v_mul_u32_u24": ("u:uu", lambda a, b: _low24(a) * _low24(b)),
    "v_mul_hi_u32_u24": ("u:uu", lambda a, b: _mul_high(_low24(a), _low24(b))),
    "v_mad_u32_u24": ("u:uuu", lambda a, b, c: _low24(a) * _low24(b) + c),
    "v_mul_lo_u16": ("H:HH", lambda a, b: a * b),
    "v_mad_u16": ("H:HHH", lambda a, b, c: a * b + c),
    "v_mad_legacy_u16": ("H:HHH", lambda a, b, c: a * b + c),
    "v_mad_u64_u32": ("Um:uuU", _mad64),
    "v_mad_i64_i32": ("Im:iiI", _mad64_signed),
    # orders
    "v_min_u32": ("u:uu", np.minimum),
    "v_max_u32": ("u:uu", np.maximum),
    "v_min_i32": ("i:ii", np.minimum),
    "v_max_i32": ("i:ii", np.maximum),
    "v_min_u16": ("H:HH", np.minimum),
    "v_max_u16": ("H:HH", np.maximum),
    "v_min_i16": ("J:JJ", np.minimum),
    "v_max_i16": ("J:JJ", np.maximum),
    "v_min3_u32": ("u:uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u:uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i:iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i:iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("u:uuu", median),
    "v_med3_i32": ("i:iii", median),
}

# With `clamp`, integers saturate instead of wrapping.
SATURATED: dict[str, Function] = {
    "v_add_u32": lambda a, b: np.where(a + b < a, U(0xFFFFFFFF), a + b),
    "v_sub_u32": lambda a, b: np.where(a < b, U(0), a - b),
}

# Instructions on both halves of a word: those of 16 bits above, `v_pk_` instead of `v_`.
PACKED_HALVES = {
    name.replace("v_", "v_pk_", 1): entry
    for name, entry in INTEGERS.items()
    if set(entry[0]) <= set("HJ:") and name not in {"v_subrev_u16", "v_mad_legacy_u16"}
}
PACKED_HALVES["v_pk_sub_i16"] = INTEGERS["v_sub_u16"]

COMPARISONS: dict[str, Function] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b),  # noqa: PLR0124 - false for NaN
    "u": lambda a, b: (a != a) | (b != b),  # noqa: PLR0124 - true for NaN
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}
COMPARED = {"u32": "u", "i32": "i", "f32": "f", "u64": "U", "i64": "I", "f64": "F", "u16": "H", "i16": "J", "f16": "h"}
