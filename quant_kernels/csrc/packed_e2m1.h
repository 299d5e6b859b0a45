// e2m1 codes of pairs of 16-bit values without leaving their dtype (Hopper and later), and of fp32 values: rounding by
// adding a power of two whose last place is the step of the codes there.
//
// A magnitude y up to 6 with the exponent E = max(0, floor(log2 y)) has the step 2^(E - 1). Adding 2^(E - 1 + m), m being
// the mantissa bits of the dtype, leaves i = RNE(y / step) in the last places of the sum, and the code is i + 2 E. Both E
// and i are cut out of bit patterns; the scaled value itself is exact wherever its rounding is not to zero.
#pragma once

#include "conversions.h"
#include "job.h"

namespace qk {

// Code of a value that was scaled, in its four low bits; higher bits are not clear.
QK_DEVICE uint32_t encode_e2m1_added(float value) {
  const uint32_t bits = bits_of(value);
  const float magnitude = __builtin_fminf(float_of(bits & kMagnitude), kE2m1Max);  // NaN too becomes 6
  const uint32_t exponent = max_u32(bits_of(magnitude) & kInfinity, 0x3f800000u);
  const uint32_t sum = bits_of(magnitude + float_of(exponent + (22u << 23)));
  return ((sum + (exponent >> 22) + 2u) & 7u) | ((bits >> 28) & 8u);
}

#if defined(QK_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(QK_SOFTWARE)
#define QK_PACKED_E2M1 1

// Two codes, in bits 0 ... 3 and 16 ... 19, of a pair of scaled bf16 values.
QK_DEVICE uint32_t encode_e2m1_bf16x2(uint32_t pair) {
  const uint32_t magnitude = __vminu2(pair & 0x7fff7fffu, 0x40c040c0u);
  const uint32_t exponent = __vmaxu2(magnitude & 0x7f807f80u, 0x3f803f80u);
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(magnitude), "r"(exponent + 0x03000300u));
  return ((sum + (exponent >> 6) + 0x00020002u) & 0x00070007u) | ((pair >> 12) & 0x00080008u);
}

// The same for fp16.
QK_DEVICE uint32_t encode_e2m1_f16x2(uint32_t pair) {
  const uint32_t magnitude = __vminu2(pair & 0x7fff7fffu, 0x46004600u);
  const uint32_t exponent = __vmaxu2(magnitude & 0x7c007c00u, 0x3c003c00u);
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(magnitude), "r"(exponent + 0x24002400u));
  return ((sum + (exponent >> 9) + 0x00020002u) & 0x00070007u) | ((pair >> 12) & 0x00080008u);
}

// Codes of four pairs / 2^(byte - 127), the first in the lowest nibble.
template <Element element>
QK_DEVICE uint32_t pack_e2m1_pairs(const uint32_t (&pairs)[4], uint32_t byte) {
  uint32_t codes[4];
  if constexpr (element == kBf16) {
    // 2^(127 - byte) as bf16: byte 254 and, by the same formula, 255 are subnormal.
    const uint32_t one = byte < 254u ? (254u - byte) << 7 : 0x40u >> (byte - 254u);
    const uint32_t factor = one * 0x00010001u;
    for (int i = 0; i < 4; ++i) {
      uint32_t scaled;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pairs[i]), "r"(factor));
      codes[i] = encode_e2m1_bf16x2(scaled);
    }
  } else {
    // 2^(127 - byte) as a product of two halves. Beyond 2^30 everything saturates, below 2^-28 everything becomes 0.
    const int power = 127 - static_cast<int>(byte);
    const int bounded = power > 30 ? 30 : (power < -28 ? -28 : power);
    const int first = bounded > 15 ? 15 : (bounded < -14 ? -14 : bounded);
    const uint32_t factor = static_cast<uint32_t>(first + 15) * 0x04000400u;
    const uint32_t rest = static_cast<uint32_t>(bounded - first + 15) * 0x04000400u;
    for (int i = 0; i < 4; ++i) {
      uint32_t scaled;
      asm("{ .reg .b32 part; mul.rn.f16x2 part, %1, %2; mul.rn.f16x2 %0, part, %3; }"
          : "=r"(scaled)
          : "r"(pairs[i]), "r"(factor), "r"(rest));
      codes[i] = encode_e2m1_f16x2(scaled);
    }
  }
  const uint32_t low = codes[0] | (codes[1] << 8), high = codes[2] | (codes[3] << 8);
  return __byte_perm(low | (low >> 12), high | (high >> 12), 0x5410);
}

// Values of 8 codes times 2^(byte - 127), rounded once to bf16. A code's bits, moved to a bf16's, are its value times 2^-126,
// subnormal or not.
QK_DEVICE void unpack_e2m1_bf16(uint32_t codes, uint32_t byte, uint32_t (&pairs)[4]) {
  const uint32_t even = codes & 0x0f0f0f0fu, odd = (codes >> 4) & 0x0f0f0f0fu;
  const uint32_t one = byte == 0 ? 0x40u : (byte == 255u ? 0x7fc0u : byte << 7), scale = one * 0x00010001u;
  for (uint32_t i = 0; i < 4; ++i) {
    // Byte i of `even` and of `odd`, each in a half of its own; 8 selects a sign, which is 0.
    uint32_t both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(even), "r"(odd), "r"(0x8480u + 0x0101u * i));
    const uint32_t tiny = (both * 0x1040u) & 0x81c081c0u;
    asm("{ .reg .b32 exact; mul.rn.bf16x2 exact, %1, %2; mul.rn.bf16x2 %0, exact, %3; }"
        : "=r"(pairs[i])
        : "r"(tiny), "r"(0x7e807e80u), "r"(scale));
  }
}

// ---- by ramps ---------------------------------------------------------------------------------------------------
//
// With h = y / 2 >= 0 a code is the nearest integer, ties to even, to 4 sat(h) + 2 sat(h - 1) + sat(h - 2), where sat cuts to
// 0 ... 1. One ramp at most has a fraction: those before it are 1, those after it 0. Added one after the other to a power of
// two whose last place is 1, they are rounded once. Multiply-adds run at twice the rate of integer instructions.

// Two codes, in the low bytes of halves.
QK_DEVICE uint32_t ramps_f16x2(uint32_t halves) {
  uint32_t codes;
  asm("{ .reg .b32 a, b, c;\n"
      "add.rn.sat.f16x2 a, %1, %2;\n"
      "add.rn.sat.f16x2 b, %1, %3;\n"
      "add.rn.sat.f16x2 c, %1, %4;\n"
      "fma.rn.f16x2 a, a, %5, %7;\n"
      "fma.rn.f16x2 a, b, %6, a;\n"
      "add.rn.f16x2 %0, a, c; }"
      : "=r"(codes)
      : "r"(halves), "r"(0u), "r"(0xbc00bc00u), "r"(0xc000c000u), "r"(0x44004400u), "r"(0x40004000u), "r"(0x64006400u));
  return codes;
}

// The code of magnitude * 2 factor, in the low byte.
QK_DEVICE uint32_t ramps_f32(float magnitude, float factor) {
  float code;
  asm("{ .reg .f32 a, b, c;\n"
      "mul.rn.sat.f32 a, %1, %2;\n"
      "fma.rn.sat.f32 b, %1, %2, %3;\n"
      "fma.rn.sat.f32 c, %1, %2, %4;\n"
      "fma.rn.f32 a, a, %5, %7;\n"
      "fma.rn.f32 a, b, %6, a;\n"
      "add.rn.f32 %0, a, c; }"
      : "=f"(code)
      : "f"(magnitude), "f"(factor), "f"(-1.0f), "f"(-2.0f), "f"(4.0f), "f"(2.0f), "f"(8388608.0f));
  return bits_of(code);
}

// What the powers of two of 8 such codes add up to, each 16 times the one before.
constexpr uint32_t kRampsBase = 0xfb000000u;

// Codes of four pairs of halves and the signs of the pairs that they come from, the first in the lowest nibble.
QK_DEVICE uint32_t join_ramps(const uint32_t (&codes)[4], const uint32_t (&pairs)[4]) {
  uint32_t joined[2];
  for (int i = 0; i < 2; ++i) {
    // Bytes: values 0, 2, 1 and 3 of the two pairs. The product moves them to the nibbles of the upper half.
    const uint32_t magnitudes = __byte_perm(codes[2 * i], codes[2 * i + 1], 0x6240);
    const uint32_t signs = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7351);
    joined[i] = (magnitudes | ((signs >> 4) & 0x08080808u)) * 0x00010010u;
  }
  return __byte_perm(joined[0], joined[1], 0x7632);
}

// Whether ramps give the codes of a group whose byte is that of its own greatest magnitude: no NaN, and as a half the
// greatest scaled value is that value.
template <Element element>
QK_DEVICE bool ramps_cover(uint32_t byte) {
  return element == kBf16 ? byte - 15u < 240u : byte < 255u;
}

// Codes of 8 values / 2^(byte - 127) of such a group.
template <Element element, int words>
QK_DEVICE uint32_t pack_e2m1_ramps(const uint32_t (&w)[words], uint32_t byte) {
  if constexpr (element == kF32) {
    const float factor = float_of(byte < 253u ? (253u - byte) << 23 : 0x00400000u >> (byte - 253u));  // 2^(126 - byte)
    uint32_t joined = 0, signs = 0;
    for (int i = 7; i >= 0; --i) joined = joined * 16u + ramps_f32(float_of(w[i] & kMagnitude), factor);
    for (int i = 0; i < 8; ++i) signs |= (w[i] >> 31) << (4 * i + 3);
    return joined - kRampsBase + signs;
  } else {
    uint32_t codes[4];
    if constexpr (element == kBf16) {
      // Halved, scaled and moved to the exponents of fp16: one addition. What falls below them is 0.
      const uint32_t shift = (((14u - byte) << 7) & 0xffffu) * 0x00010001u;
      for (int i = 0; i < 4; ++i) {
        codes[i] = ramps_f16x2(__viaddmax_s16x2_relu(w[i] & 0x7fff7fffu, shift, 0u) << 3);
      }
    } else {
      const int power = 126 - static_cast<int>(byte);
      const int bounded = power > 30 ? 30 : (power < -28 ? -28 : power);
      const int first = bounded > 15 ? 15 : (bounded < -14 ? -14 : bounded);
      const uint32_t factor = static_cast<uint32_t>(first + 15) * 0x04000400u;
      const uint32_t rest = static_cast<uint32_t>(bounded - first + 15) * 0x04000400u;
      for (int i = 0; i < 4; ++i) {
        uint32_t scaled;
        asm("{ .reg .b32 part; mul.rn.f16x2 part, %1, %2; mul.rn.f16x2 %0, part, %3; }"
            : "=r"(scaled)
            : "r"(w[i] & 0x7fff7fffu), "r"(factor), "r"(rest));
        codes[i] = ramps_f16x2(scaled);
      }
    }
    return join_ramps(codes, w);
  }
}

#endif

}  // namespace qk
