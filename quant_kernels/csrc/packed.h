// Packs: what one lane holds of a row, and conversions of several values at once, in hardware where the target has the
// instruction. Every form gives the bits of conversions.h.
#pragma once

#include "conversions.h"
#include "job.h"
#include "packed_e2m1.h"

// Hardware conversions are used unless QK_SOFTWARE is defined: gfx950 has OCP ones; gfx942's are FNUZ (greatest value
// 240), so that OCP codes are made in software there.
#if !defined(QK_SOFTWARE)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define QK_NVIDIA_FP8 1
#elif defined(__gfx950__)
#define QK_GFX950 1
#elif defined(__gfx942__)
#define QK_GFX942 1
#endif
#endif

namespace qk {

// `lane` neighbouring values: two a word for 16-bit dtypes, one a word for fp32.
template <Element element, int lane>
struct Pack {
  static constexpr Element kElement = element;
  static constexpr int kLane = lane;
  static constexpr bool kHalves = element != kF32;
  static constexpr int kWords = kHalves ? lane / 2 : lane;
  uint32_t w[kWords];

  QK_DEVICE_MEMBER float value(int i) const {
    if constexpr (element == kF32) {
      return float_of(w[i]);
    } else if constexpr (element == kBf16) {
      return float_of(i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xffff0000u);
    } else {
      const uint16_t half = static_cast<uint16_t>(i % 2 == 0 ? w[i / 2] : w[i / 2] >> 16);
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
      float found;
      asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(half));
      return found;
#else
      return f16_to_float(half);
#endif
    }
  }

  QK_DEVICE_MEMBER void clear() {
    for (int i = 0; i < kWords; ++i) w[i] = 0;
  }

  // Put a stored value (its bits) in place; the pack was cleared before.
  QK_DEVICE_MEMBER void put(int i, uint32_t bits) {
    if constexpr (kHalves) {
      w[i / 2] |= bits << (i % 2 * 16);
    } else {
      w[i] = bits;
    }
  }

  // Greatest magnitude, of each half of a word apart for 16-bit dtypes: greatest() and reduced() work on such.
  QK_DEVICE_MEMBER uint32_t partial_amax() const {
    uint32_t found = 0;
    for (int i = 0; i < kWords; ++i) found = greater(found, w[i] & (kHalves ? 0x7fff7fffu : kMagnitude));
    return found;
  }

  static QK_DEVICE_MEMBER uint32_t greater(uint32_t a, uint32_t b) { return kHalves ? max_halves(a, b) : max_u32(a, b); }

  // The fp32 bits of a partial maximum.
  static QK_DEVICE_MEMBER uint32_t amax_bits(uint32_t partial) {
    if constexpr (!kHalves) return partial;
    const uint32_t greatest = max_u32(partial >> 16, partial & 0xffffu);
    return element == kBf16 ? greatest << 16 : bits_of(f16_to_float(static_cast<uint16_t>(greatest)));
  }
};

// ---- rounding to the dtypes that quantized sources pass through --------------------------------------------------

QK_DEVICE uint32_t pack_bf16(float low, float high) {
#if defined(QK_NVIDIA_FP8)
  uint32_t found;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
#else
  return float_to_bf16(low) | (float_to_bf16(high) << 16);
#endif
}

QK_DEVICE uint32_t pack_f16(float low, float high) {
#if defined(QK_NVIDIA_FP8)
  uint32_t found;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
#else
  return float_to_f16(low) | (float_to_f16(high) << 16);
#endif
}

// Values of a pack rounded to its dtype.
template <Element element, int lane>
QK_DEVICE void round_into(const float (&values)[lane], Pack<element, lane>& pack) {
  for (int i = 0; i < Pack<element, lane>::kWords; ++i) {
    if constexpr (element == kF32) {
      pack.w[i] = bits_of(values[i]);
    } else if constexpr (element == kBf16) {
      pack.w[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
    } else {
      pack.w[i] = pack_f16(values[2 * i], values[2 * i + 1]);
    }
  }
}

// ---- e4m3 -------------------------------------------------------------------------------------------------------

// Four codes, the first in the lowest byte.
QK_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
#if defined(QK_NVIDIA_FP8)
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<uint32_t>(low) | (static_cast<uint32_t>(high) << 16);
#elif defined(QK_GFX950)
  // The instruction's own treatment of large values depends on a mode bit: clamp before, NaN after.
  const float in[4] = {a, b, c, d};
  float clamped[4];
  uint32_t nan = 0;
  for (int i = 0; i < 4; ++i) {
    clamped[i] = __builtin_amdgcn_fmed3f(in[i], -kE4m3Max, kE4m3Max);
    nan |= (in[i] != in[i] ? 0xffu : 0u) << (8 * i);
  }
  int word = __builtin_amdgcn_cvt_pk_fp8_f32(clamped[0], clamped[1], 0, false);
  word = __builtin_amdgcn_cvt_pk_fp8_f32(clamped[2], clamped[3], word, true);
  return (static_cast<uint32_t>(word) & ~nan) | (0x7f7f7f7fu & nan);
#else
  return encode_e4m3(a) | (encode_e4m3(b) << 8) | (encode_e4m3(c) << 16) | (encode_e4m3(d) << 24);
#endif
}

QK_DEVICE uint32_t pack_e4m3fnuz(float a, float b, float c, float d) {
#if defined(QK_GFX942)
  const float in[4] = {a, b, c, d};
  float clamped[4];
  uint32_t nan = 0;
  for (int i = 0; i < 4; ++i) {
    clamped[i] = __builtin_amdgcn_fmed3f(in[i], -kE4m3FnuzMax, kE4m3FnuzMax);
    nan |= (in[i] != in[i] ? 0xffu : 0u) << (8 * i);
  }
  int word = __builtin_amdgcn_cvt_pk_fp8_f32(clamped[0], clamped[1], 0, false);
  word = __builtin_amdgcn_cvt_pk_fp8_f32(clamped[2], clamped[3], word, true);
  return (static_cast<uint32_t>(word) & ~nan) | (0x80808080u & nan);
#else
  return encode_e4m3fnuz(a) | (encode_e4m3fnuz(b) << 8) | (encode_e4m3fnuz(c) << 16) | (encode_e4m3fnuz(d) << 24);
#endif
}

// Values of four codes.
QK_DEVICE void unpack_e4m3(uint32_t codes, float* values) {
#if defined(QK_NVIDIA_FP8)
  for (int pair = 0; pair < 2; ++pair) {
    const uint16_t two = static_cast<uint16_t>(codes >> (16 * pair));
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(values[2 * pair]), "=f"(values[2 * pair + 1])
        : "r"(halves));
  }
#else
  for (int i = 0; i < 4; ++i) values[i] = decode_e4m3((codes >> (8 * i)) & 0xffu);
#endif
}

// Values of eight 4-bit codes, the first in the lowest nibble. A code's three low bits, moved to a half's, are the number
// times 2^-14: exact, subnormal or not.
QK_DEVICE void unpack_e2m1(uint32_t codes, float* values) {
#if defined(QK_NVIDIA_FP8)
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t two = codes >> (8 * pair);
    const uint32_t halves = ((two & 0x7u) << 9) | ((two & 0x70u) << 21) | ((two & 0x8u) << 12) | ((two & 0x80u) << 24);
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(values[2 * pair]), "=f"(values[2 * pair + 1])
        : "r"(halves));
    values[2 * pair] *= 16384.0f;
    values[2 * pair + 1] *= 16384.0f;
  }
#else
  for (int i = 0; i < 8; ++i) values[i] = decode_e2m1((codes >> (4 * i)) & 15u);
#endif
}

// ---- e2m1 -------------------------------------------------------------------------------------------------------

// Codes of 8 values / 2^(byte - 127), the first in the lowest nibble. Any byte will do.
template <Element element>
QK_DEVICE uint32_t pack_e2m1(const Pack<element, 8>& pack, uint32_t byte) {
#if defined(QK_PACKED_E2M1)
  if constexpr (element != kF32) return pack_e2m1_pairs<element>(pack.w, byte);
#endif
#if defined(QK_GFX950)
  // The instruction multiplies by the inverse of the scale, rounds and saturates; it takes the scale as a float.
  if (byte > 0 && byte < 255u) {
    const float scale = decode_e8m0(byte);
    uint32_t word = 0;
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, pack.value(0), pack.value(1), scale, 0);
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, pack.value(2), pack.value(3), scale, 1);
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, pack.value(4), pack.value(5), scale, 2);
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, pack.value(6), pack.value(7), scale, 3);
    return word;
  }
#endif
  const float factor = inverse_e8m0(byte);
  uint32_t word = 0;
#if defined(QK_PACKED_E2M1)
  // The product of a NaN is a NaN without a sign there, as the form by addition wants it.
  for (int i = 0; i < 8; ++i) word |= encode_e2m1_added(pack.value(i) * factor) << (4 * i);
#else
  for (int i = 0; i < 8; ++i) word |= encode_e2m1(pack.value(i) * factor) << (4 * i);
#endif
  return word;
}

// The same; `own` says that the byte is that of the group's own greatest magnitude.
template <Element element>
QK_DEVICE uint32_t pack_e2m1(const Pack<element, 8>& pack, uint32_t byte, [[maybe_unused]] bool own) {
#if defined(QK_PACKED_E2M1)
  if (own && ramps_cover<element>(byte)) return pack_e2m1_ramps<element>(pack.w, byte);
#endif
  return pack_e2m1(pack, byte);
}

}  // namespace qk
