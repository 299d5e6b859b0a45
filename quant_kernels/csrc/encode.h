// From values to codes: division by a scale, e4m3 codes of a pack, their errors, and the store.
#pragma once

#include "device_source.h"

namespace qk {

// Σ v² and Σ (v - d)² of one lane.
struct LaneSums {
  float squares = 0.0f, errors = 0.0f;

  QK_DEVICE_MEMBER void add(float value, float decoded) {
    const float difference = value - decoded;
    squares = fused(value, value, squares);
    errors = fused(difference, difference, errors);
  }

  static QK_DEVICE_MEMBER float fused(float a, float b, float c) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }

  // Add those of the lanes up to `lanes` - 1 away (a power of two up to 32), in a fixed order.
  QK_DEVICE_MEMBER void reduce(int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) {
      squares += float_of(shuffle_xor(bits_of(squares), distance));
      errors += float_of(shuffle_xor(bits_of(errors), distance));
    }
  }
};

// ---- codes ------------------------------------------------------------------------------------------------------

// Division of many values by one scale: correctly rounded, as IEEE division is. With r = RN(1 / s) and q = RN(x r), the
// remainder x - q s is exact in a fused multiply-add, and RN(q + remainder r) is RN(x / s) (Markstein) as long as
// nothing over- or underflows. `plain` says that nothing can, for any value up to the greatest of the row. Else both
// sides are multiplied by 2^64 under a tiny scale, an infinite scale gives zeros (NaN for infinite values), and quotients
// far beyond every code are cut before they spoil the remainder.
struct Divider {
  float scale, inverse, factor;
  bool plain;

  QK_DEVICE_MEMBER Divider(float by, uint32_t amax) {
    plain = by >= 8.2718061e-25f && by <= 1.2089258e+24f && float_of(amax) <= by * 1024.0f;  // 2^-80, 2^80
    factor = by < 7.8886090522101181e-31f ? 18446744073709551616.0f : 1.0f;  // under 2^-100: 2^64
    const float scaled = by * factor;
    inverse = 1.0f / scaled;
    scale = bits_of(scaled) == kInfinity ? 0.0f : scaled;
  }

  QK_DEVICE_MEMBER float divide(float value) const {
    const float dividend = float_of(bits_of(value) & kMagnitude) * factor;
    const float quotient = __builtin_fminf(dividend * inverse, 1024.0f);
    const float remainder = LaneSums::fused(-quotient, scale, dividend);
    const float corrected = LaneSums::fused(remainder, inverse, quotient);
    // The sign is put back last: the correction of -0 would be +0.
    return float_of((bits_of(corrected) & kMagnitude) | (bits_of(value) & ~kMagnitude));
  }

  QK_DEVICE_MEMBER float divide_plain(float value) const {
    const float quotient = value * inverse;
    const float remainder = LaneSums::fused(-quotient, scale, value);
    const float corrected = LaneSums::fused(remainder, inverse, quotient);
    return float_of(bits_of(corrected) | (bits_of(value) & ~kMagnitude));  // the correction of -0 is +0
  }
};

// Four codes a word of a pack's values divided by a scale.
template <bool plain, class Values>
QK_DEVICE void encode_divided(const Values& values, const Divider& divider, bool fnuz,
                              uint32_t (&codes)[Values::kLane / 4]) {
  for (int i = 0; i < Values::kLane / 4; ++i) {
    float ratio[4];
    for (int j = 0; j < 4; ++j) {
      ratio[j] = plain ? divider.divide_plain(values.value(4 * i + j)) : divider.divide(values.value(4 * i + j));
    }
    codes[i] = fnuz ? pack_e4m3fnuz(ratio[0], ratio[1], ratio[2], ratio[3])
                    : pack_e4m3(ratio[0], ratio[1], ratio[2], ratio[3]);
  }
}

// Add the squares of a pack's values and of the errors of its e4m3 codes.
template <class Values>
QK_DEVICE void add_e4m3_errors(LaneSums& sums, const Values& values, const uint32_t (&codes)[Values::kLane / 4],
                               float scale, bool fnuz) {
  for (int i = 0; i < Values::kLane / 4; ++i) {
    float decoded[4];
    if (fnuz) {
      for (int j = 0; j < 4; ++j) decoded[j] = decode_e4m3fnuz((codes[i] >> (8 * j)) & 0xffu);
    } else {
      unpack_e4m3(codes[i], decoded);
    }
    for (int j = 0; j < 4; ++j) sums.add(values.value(4 * i + j), decoded[j] * scale);
  }
}

// Bytes of codes of one pack to their place; `live` of them exist.
template <int words>
QK_DEVICE void store_codes(uint8_t* address, const uint32_t (&codes)[words], bool whole, int live) {
  if (whole) {
    if constexpr (words == 1) {
      store_once(address, Words1{{codes[0]}});
    } else if constexpr (words == 2) {
      store_once(address, Words2{{codes[0], codes[1]}});
    } else {
      store_once(address, Words4{{codes[0], codes[1], codes[2], codes[3]}});
    }
    return;
  }
  for (int i = 0; i < words * 4; ++i) {
    if (i < live) address[i] = static_cast<uint8_t>(codes[i / 4] >> (i % 4 * 8));
  }
}

}  // namespace qk
