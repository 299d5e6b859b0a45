// Rows of x on their way into the linear product: quantized if asked for, as f16 with one factor a row.
//
// A factor is a power of two (with per-token FP8: the token's scale), chosen so that the greatest value lies in
// [2^14, 2^15): what f16 cannot hold of a 16-bit float then is below 2^-39 of the row's greatest value.
#pragma once

#include "encode.h"
#include "linear.h"
#include "packed.h"

#if defined(QK_CUDA)
#include "linear_nvidia.h"
#endif

namespace qk {

QK_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(QK_CUDA)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

QK_DEVICE float x_value(Element element, uint32_t word, int half) {
  const uint32_t bits = half ? word >> 16 : word & 0xffffu;
  if (element == kBf16) return float_of(bits << 16);
#if defined(QK_CUDA)
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(static_cast<uint16_t>(bits)));
  return found;
#else
  return f16_to_float(static_cast<uint16_t>(bits));
#endif
}

// Greatest magnitude of 8 values, of the two halves of their words apart.
QK_DEVICE uint32_t greatest_of(const Words4& words) {
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found = max_halves(found, words.w[i] & 0x7fff7fffu);
  return found;
}

// The same, of 32 lanes, as the bits of one 16-bit float.
QK_DEVICE uint32_t greatest_of_lanes(uint32_t found) {
  found = max_u32(found >> 16, found & 0xffffu);
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __reduce_max_sync(0xffffffffu, found);
#else
  for (int distance = 16; distance > 0; distance /= 2) found = max_u32(found, shuffle_xor(found, distance));
  return found;
#endif
}

// Exponent byte of 2^f, where amax * 2^f lies in [2^14, 2^15) if that can be.
QK_DEVICE uint32_t x_shift(uint32_t amax) {
  const uint32_t exponent = amax >> 23;
  const uint32_t shift = exponent >= 15 ? 268u - exponent : 253u;
  return amax == 0 ? 127u : shift;
}

// How the values of one row become ready, known once its greatest magnitude (the bits of a 16-bit float) is.
template <bool quantized>
struct RowOfX {
  Element element;
  Activation activation;
  float shift, factor;  // what values are multiplied by on their way, and what sums are multiplied by
  Divider divider;

  QK_DEVICE_MEMBER RowOfX(const LinearJob& job, uint32_t amax16)
      : element(job.element), activation(job.activation), divider(1.0f, 0) {
    const uint32_t amax = bits_of(x_value(element, amax16, 0));
    if (quantized && activation == kPerTokenFp8) {
      factor = fp32_scale(amax, kE4m3Max);
      divider = Divider(factor, amax);
    } else {
      factor = float_of((254u - x_shift(amax)) << 23);
    }
    shift = float_of(x_shift(amax) << 23);
  }

  // Eight neighbouring values as pairs of f16; the lanes of a group of 32 are neighbours, too.
  QK_DEVICE_MEMBER Words4 ready(const Words4& words) const {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = x_value(element, words.w[i / 2], i & 1);
    if (!quantized || activation == kAsIs) {
      for (int i = 0; i < 8; ++i) values[i] *= shift;
    } else if (activation == kPerTokenFp8) {
      if (divider.plain) {
        for (int i = 0; i < 8; ++i) values[i] = divider.divide_plain(values[i]);
      } else {
        for (int i = 0; i < 8; ++i) values[i] = divider.divide(values[i]);
      }
      round_e4m3(values);
    } else {
      round_group(values);
    }
    Words4 found;
    for (int i = 0; i < 4; ++i) found.w[i] = pack_f16(values[2 * i], values[2 * i + 1]);
    return found;
  }

 private:
  static QK_DEVICE_MEMBER void round_e4m3(float (&values)[8]) {
    for (int i = 0; i < 8; i += 4) unpack_e4m3(pack_e4m3(values[i], values[i + 1], values[i + 2], values[i + 3]), values + i);
  }

  QK_DEVICE_MEMBER void round_group(float (&values)[8]) const {
    const bool fp8 = activation == kGroupedFp8;
    uint32_t greatest = 0;
    for (int i = 0; i < 8; ++i) greatest = max_u32(greatest, bits_of(values[i]) & kMagnitude);
    greatest = max_u32(greatest, shuffle_xor(greatest, 1));
    greatest = max_u32(greatest, shuffle_xor(greatest, 2));
    const uint32_t byte = e8m0_of_amax(greatest, scale_rounding_bits(fp8 ? 2 : 0, fp8 ? 8 : 4), fp8 ? 8 : 2);
    const float inverse = inverse_e8m0(byte);
    for (int i = 0; i < 8; ++i) values[i] *= inverse;
    if (fp8) {
      round_e4m3(values);
    } else {
      for (int i = 0; i < 8; ++i) values[i] = decode_e2m1(encode_e2m1(values[i]));
    }
    const float scale = decode_e8m0(byte) * shift;
    for (int i = 0; i < 8; ++i) values[i] *= scale;
  }
};

// Store elements k .. k+7 of a row (k a multiple of 8). In the order of the row; but where tensor cores multiply, so that
// 8 neighbours are what one lane of their instructions needs: for FP8, lane t of four has elements 4t .. 4t+3 of each half
// of a group of 32; for FP4, elements 8t .. 8t+7, of which those whose nibbles lie 16 bits apart are a pair.
QK_DEVICE void store_ready(uint16_t* row, int64_t k, [[maybe_unused]] WeightFormat format, const Words4& words) {
#if defined(QK_CUDA)
  if (format != kGroupFp4) {
    const int r = static_cast<int>(k % 32);
    for (int i = 0; i < 2; ++i) {
      const int place = (((r + 4 * i) & 12) << 1) | ((r >> 4) << 2);
      *reinterpret_cast<Words2*>(row + k - r + place) = Words2{words.w[2 * i], words.w[2 * i + 1]};
    }
    return;
  }
  Words4 pairs;
  pairs.w[0] = __byte_perm(words.w[0], words.w[2], 0x5410);
  pairs.w[1] = __byte_perm(words.w[1], words.w[3], 0x5410);
  pairs.w[2] = __byte_perm(words.w[0], words.w[2], 0x7632);
  pairs.w[3] = __byte_perm(words.w[1], words.w[3], 0x7632);
  *reinterpret_cast<Words4*>(row + k) = pairs;
#else
  *reinterpret_cast<Words4*>(row + k) = words;
#endif
}

// Round and store.
QK_DEVICE void store_result(const LinearJob& job, int64_t at, float value) {
  const uint32_t bits = job.element == kBf16 ? pack_bf16(value, value) : pack_f16(value, value);
  static_cast<uint16_t*>(job.y)[at] = static_cast<uint16_t>(bits);
}

}  // namespace qk
