// Every conversion of one value, in integer arithmetic: the reference that runs everywhere, branch-free so that loops
// over it vectorize. Rounding is to nearest, ties to even; results saturate; NaN becomes the format's NaN.
// Formulas: OCP OFP8 and Microscaling v1.0; hardware forms of the same are in packed.h.
#pragma once

#include "portability.h"

namespace qk {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kQuietNan = 0x7fc00000u;
constexpr float kE4m3Max = 448.0f;
constexpr float kE4m3FnuzMax = 240.0f;
constexpr float kE2m1Max = 6.0f;
constexpr float kTinyScale = 1.17549435e-38f;  // 2^-126

// ---- 16-bit floats ----------------------------------------------------------------------------------------------

QK_FN float bf16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

QK_FN uint32_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & kMagnitude) > kInfinity ? 0x7fc0u : rounded;
}

QK_FN float f16_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // A subnormal half is an integer times 2^-24: exact, and never a subnormal float.
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | kInfinity;
  const uint32_t finite = magnitude < 0x400u ? small : normal;
  return float_of((magnitude >= 0x7c00u ? special : finite) | sign);
}

QK_FN uint32_t float_to_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitude;
  // Adding 1/2 (whose last place is 2^-24, the step of subnormal halves) rounds to that step.
  const uint32_t small = bits_of(float_of(min_u32(magnitude, 0x38800000u)) + 0.5f) - 0x3f000000u;
  const uint32_t normal = min_u32((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13, 0x7c00u);
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t rounded = magnitude >= 0x47800000u ? 0x7c00u : finite;
  return (magnitude > kInfinity ? 0x7e00u : rounded) | ((bits >> 16) & 0x8000u);
}

// ---- 8-bit floats -----------------------------------------------------------------------------------------------

// Codes of a format with 3 mantissa bits: `bias` 7 (e4m3fn) or 8 (FNUZ), greatest magnitude `greatest` (fp32 bits).
template <int bias>
QK_FN uint32_t encode_three_bits(uint32_t magnitude, uint32_t greatest) {
  constexpr uint32_t least_normal = static_cast<uint32_t>(127 + 1 - bias) << 23;
  // The number whose last place is the step of subnormal codes, 2^(1 - bias - 3): adding it rounds to that step.
  constexpr uint32_t rounder = static_cast<uint32_t>(127 + 1 - bias - 3 + 23) << 23;
  const uint32_t clamped = min_u32(magnitude, greatest);
  const uint32_t small = bits_of(float_of(min_u32(clamped, least_normal)) + float_of(rounder)) - rounder;
  const uint32_t normal =
      ((clamped + 0x7ffffu + ((clamped >> 20) & 1u)) >> 20) - (static_cast<uint32_t>(127 - bias) << 3);
  return clamped < least_normal ? small : normal;
}

QK_FN uint32_t encode_e4m3(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t code = encode_three_bits<7>(magnitude, 0x43e00000u) | ((bits >> 24) & 0x80u);
  return magnitude > kInfinity ? 0x7fu : code;
}

// There is no -0 in FNUZ: 0x80 is its NaN.
QK_FN uint32_t encode_e4m3fnuz(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t code = encode_three_bits<8>(magnitude, 0x43700000u);
  const uint32_t with_sign = code | (code == 0 ? 0u : (bits >> 24) & 0x80u);
  return magnitude > kInfinity ? 0x80u : with_sign;
}

template <int bias>
QK_FN uint32_t decode_three_bits(uint32_t magnitude) {
  const float step = float_of(static_cast<uint32_t>(127 + 1 - bias - 3) << 23);
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * step);
  const uint32_t normal = (magnitude << 20) + (static_cast<uint32_t>(127 - bias) << 23);
  return magnitude < 8u ? small : normal;
}

QK_FN float decode_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t value = decode_three_bits<7>(magnitude) | ((code & 0x80u) << 24);
  return float_of(magnitude == 0x7fu ? kQuietNan : value);
}

QK_FN float decode_e4m3fnuz(uint32_t code) {
  const uint32_t value = decode_three_bits<8>(code & 0x7fu) | ((code & 0x80u) << 24);
  return float_of(code == 0x80u ? kQuietNan : value);
}

// ---- 4-bit floats -----------------------------------------------------------------------------------------------

QK_FN uint32_t encode_e2m1(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t clamped = min_u32(magnitude, 0x40c00000u);
  // 2^22 has the last place 1/2, the step below 1.
  const uint32_t small = bits_of(float_of(min_u32(clamped, 0x3f800000u)) + 4194304.0f) - 0x4a800000u;
  const uint32_t normal = ((clamped + 0x1fffffu + ((clamped >> 22) & 1u)) >> 22) - 252u;
  const uint32_t code = clamped < 0x3f800000u ? small : normal;
  return code | (magnitude > kInfinity ? 0u : (bits >> 28) & 8u);
}

QK_FN float decode_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const uint32_t small = magnitude == 0 ? 0u : 0x3f000000u;
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  return float_of((magnitude < 2u ? small : normal) | ((code & 8u) << 28));
}

// ---- scales -----------------------------------------------------------------------------------------------------

// What is added to the bits of a maximum before its exponent is cut out, by rounding (even, floor, rceil).
QK_FN uint32_t scale_rounding_bits(int rounding, int element_bits) {
  const uint32_t even = element_bits == 4 ? 0x200000u : 0x80000u;
  const uint32_t ceil = element_bits == 4 ? 0x3fffffu : 0x1fffffu;
  return rounding == 0 ? even : (rounding == 1 ? 0u : ceil);
}

// E8M0 byte of a block whose greatest magnitude has the bits `amax`; 255 for Inf and NaN.
QK_FN uint32_t e8m0_of_amax(uint32_t amax, uint32_t rounding_bits, uint32_t max_exponent) {
  const uint32_t exponent = (amax + rounding_bits) >> 23;
  const uint32_t byte = exponent > max_exponent ? exponent - max_exponent : 0u;
  return amax >= kInfinity ? 255u : byte;
}

// 2^(byte - 127); byte 0 is a subnormal.
QK_FN float decode_e8m0(uint32_t byte) {
  const uint32_t number = byte == 0 ? 0x00400000u : byte << 23;
  return float_of(byte == 255u ? kQuietNan : number);
}

// 2^(127 - byte), the exact inverse; by the same formula 2^-128 for 255.
QK_FN float inverse_e8m0(uint32_t byte) {
  const uint32_t subnormal = byte == 254u ? 0x00400000u : 0x00200000u;
  return float_of(byte < 254u ? (254u - byte) << 23 : subnormal);
}

// RN(amax / greatest), at least 2^-126, 1 for a zero row, the quiet NaN for NaN.
QK_FN float fp32_scale(uint32_t amax, float greatest) {
  const float ratio = float_of(amax) / greatest;
  const float scale = ratio < kTinyScale ? kTinyScale : ratio;
  const float number = amax == 0 ? 1.0f : scale;
  return amax > kInfinity ? float_of(kQuietNan) : number;
}

// NVFP4: scale of the scales, and the e4m3 scale of a block of 16 (0 for a block of zeros).
QK_FN float nvfp4_second_scale(uint32_t amax) {
  return amax > kInfinity ? float_of(kQuietNan) : float_of(amax) / 2688.0f;
}

QK_FN uint32_t nvfp4_scale(uint32_t block_amax, float second) {
  return block_amax == 0 ? 0u : encode_e4m3((float_of(block_amax) / kE2m1Max) / second);
}

// e2m1 code of value / step; 0 where the step is 0.
QK_FN uint32_t nvfp4_code(float value, float step) { return step == 0.0f ? 0u : encode_e2m1(value / step); }

}  // namespace qk
