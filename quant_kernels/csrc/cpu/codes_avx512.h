// Codes of rows with AVX-512 (F, BW, DQ, VL): the functions of codes_portable.h, bit for bit.
//
// bf16 weights under powers of two never leave 16 bits: a scale only shifts the exponent field. FP8 and FP4 codes are
// looked up as bf16, which holds all of them exactly. The rest goes through fp32, where adding a power of two rounds to
// its last place: whatever the exponent of the value, the sum's low bits count steps of the code.

namespace portable {
#include "codes_portable.h"
}

using portable::pack_nibbles;
using portable::unpack_nibbles;

static inline __m512i words(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
static inline __m512i halves(uint32_t value) { return _mm512_set1_epi16(static_cast<short>(value)); }

// A constant that stays in a register: the compiler would make it anew in every turn of a loop.
static inline __m512i kept(__m512i constant) {
  asm("" : "+v"(constant));
  return constant;
}

constexpr int kOrWithin = 0xf8;  // a | (b & c) of three operands
constexpr int kWithinOr = 0xa8;  // (a | b) & c

// ---- fp32 lanes -------------------------------------------------------------------------------------------------

// 16 values of a row, zeros where `live` is not set.
template <Element element>
static inline __m512 load_floats(const typename Reader<element>::Stored* x, __mmask16 live = 0xffff) {
  if constexpr (element == kF32) {
    return _mm512_maskz_loadu_ps(live, x);
  } else {
    const __m256i stored = _mm256_maskz_loadu_epi16(live, x);
    if constexpr (element == kF16) return _mm512_cvtph_ps(stored);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
  }
}

// Codes of fp32 values in the low bytes of the lanes, whose other bytes mean nothing: `mantissa` bits of it, the exponent
// `least` (biased, of fp32) for subnormals, at most the magnitude `greatest`.
template <int mantissa, int least, uint32_t greatest>
struct Codes {
  // The sum counts steps of the code in its last places, from an offset there: even, so that ties go as without it.
  static constexpr uint32_t kOffset = (0u - (static_cast<uint32_t>(least) << mantissa)) & 0xffu;
  static_assert(kOffset % 2 == 0);
  const __m512i magnitude = kept(words(kMagnitude)), infinity = kept(words(kInfinity)), clamp = kept(words(greatest));
  const __m512i smallest = kept(words(least << 23)), rounder = kept(words(((23 - mantissa) << 23) + kOffset));
  const __m512i sign = kept(words(mantissa == 3 ? 0x80u : 8u)), nan = kept(words(mantissa == 3 ? 0x7fu : 7u));

  Codes() {}  // an implicit one would not be built for this instruction set

  template <bool with_nan = true>
  __attribute__((always_inline)) __m512i of(__m512 value) const {
    const __m512i bits = _mm512_castps_si512(value), absolute = _mm512_and_si512(bits, magnitude);
    const __m512i clamped = _mm512_min_epi32(absolute, clamp);
    const __m512i exponent = _mm512_max_epi32(_mm512_and_si512(clamped, infinity), smallest);
    const __m512 step = _mm512_castsi512_ps(_mm512_add_epi32(exponent, rounder));
    const __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(clamped), step));
    const __m512i codes = _mm512_add_epi32(sum, _mm512_srli_epi32(exponent, 23 - mantissa));
    const __m512i high = _mm512_srli_epi32(bits, mantissa == 3 ? 24 : 28);
    const __m512i with_sign = _mm512_ternarylogic_epi32(codes, high, sign, kOrWithin);
    if (!with_nan) return with_sign;
    return _mm512_mask_mov_epi32(with_sign, _mm512_cmpgt_epi32_mask(absolute, infinity), nan);
  }
};

using E4m3Codes = Codes<3, 121, 0x43e00000u>;
using E2m1Codes = Codes<1, 127, 0x40c00000u>;

// 16 codes of 4 bits in the low bytes of the lanes to 8 bytes.
static inline void store_pairs(uint8_t* out, __m512i codes) {
  const __m128i pairs = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(codes), _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(pairs, pairs));
}

static inline void store_bytes(uint8_t* out, __m512i codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(codes));
}

// ---- maxima -----------------------------------------------------------------------------------------------------

static inline uint32_t greatest_of_8(__m128i magnitudes) {
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(magnitudes, _mm_set1_epi32(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xffffu;
}

template <Element element, int size>
static inline void group_maxima(const typename Reader<element>::Stored* x, int64_t groups, uint32_t* amax) {
  if constexpr (element == kF32) {
    for (int64_t g = 0; g < groups; ++g) {
      __m512i greatest = _mm512_and_si512(_mm512_loadu_si512(x + g * size), words(kMagnitude));
      if (size == 32) {
        greatest = _mm512_max_epu32(greatest, _mm512_and_si512(_mm512_loadu_si512(x + g * size + 16), words(kMagnitude)));
      }
      amax[g] = _mm512_reduce_max_epu32(greatest);
    }
  } else {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    for (int64_t g = 0; g < groups; ++g) {
      const __m256i* group = reinterpret_cast<const __m256i*>(x + g * size);
      __m256i greatest = _mm256_and_si256(_mm256_loadu_si256(group), magnitude);
      if (size == 32) greatest = _mm256_max_epu16(greatest, _mm256_and_si256(_mm256_loadu_si256(group + 1), magnitude));
      const uint32_t found = greatest_of_8(_mm_max_epu16(_mm256_castsi256_si128(greatest), _mm256_extracti128_si256(greatest, 1)));
      amax[g] = element == kBf16 ? found << 16 : bits_of(f16_to_float(static_cast<uint16_t>(found)));
    }
  }
}

// ---- encoding ---------------------------------------------------------------------------------------------------

template <Element element, bool fnuz, bool with_nan>
static inline void encode_divided(const typename Reader<element>::Stored* x, int64_t count, float scale, uint8_t* codes) {
  if constexpr (fnuz) {
    portable::encode_divided<element, fnuz, with_nan>(x, count, scale, codes);
  } else {
    const __m512 by = _mm512_set1_ps(scale);
    const E4m3Codes lanes;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      store_bytes(codes + i, lanes.template of<with_nan>(_mm512_div_ps(load_floats<element>(x + i), by)));
    }
    if (i == count) return;
    const __mmask16 live = static_cast<__mmask16>((1u << (count - i)) - 1u);
    const __m512i last = lanes.template of<with_nan>(_mm512_div_ps(load_floats<element>(x + i, live), by));
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, live, last);
  }
}

// A group of 32 through fp32, for any source and any scale.
template <int bits>
struct CodesOf {
  using Type = E4m3Codes;
};
template <>
struct CodesOf<4> {
  using Type = E2m1Codes;
};
template <int bits>
using MxCodes = typename CodesOf<bits>::Type;

template <Element element, int bits>
static inline void encode_group(const MxCodes<bits>& lanes, const typename Reader<element>::Stored* x, uint32_t byte,
                                uint8_t* out) {
  const __m512 factor = _mm512_set1_ps(inverse_e8m0(byte));
  for (int64_t half = 0; half < 2; ++half) {
    const __m512 scaled = _mm512_mul_ps(load_floats<element>(x + half * 16), factor);
    if (bits == 4) store_pairs(out + half * 8, lanes.of(scaled));
    if (bits == 8) store_bytes(out + half * 16, lanes.of(scaled));
  }
}

// Groups of 32 in bf16 lanes.
template <int bits>
struct Bf16Groups {
  static constexpr uint32_t kBelow = bits == 4 ? 4 : 11;  // binades kept below the scale's own: what is smaller becomes 0
  const __m512i magnitude = kept(halves(0x7fff)), infinity = kept(halves(0x7f80)), one = kept(halves(1));
  const __m512i sign = kept(halves(bits == 4 ? 8 : 0x80)), greatest = kept(halves(bits == 4 ? 7 : 0x7e));
  // 1.0 is 4 << 7 after scaling to 4 bits, 2^-6 is 5 << 7 after scaling to 8. There codes begin to have all their bits.
  const __m512i least = kept(halves((bits == 4 ? 4u : 5u) << 7));
  const __m512i quarter = kept(halves(2u << 7)), three_quarters = kept(halves((3u << 7) + 64u));
  const __m512i rounder = kept(halves(bits == 4 ? 0x1fu - (3u << 7) : 7u - (32u << 4)));

  Bf16Groups() {}  // an implicit one would not be built for this instruction set

  // Returns false, and stores nothing, if the group holds NaN or what a shift of the exponent does not scale exactly:
  // codes below the least normal one, bytes so small that subnormal weights would count.
  __attribute__((always_inline)) bool encode(const uint16_t* x, uint32_t byte, uint8_t* out) const {
    if (byte < kBelow || byte > 254) return false;
    const __m512i stored = _mm512_loadu_si512(x), absolute = _mm512_and_si512(stored, magnitude);
    const __m512i scaled = _mm512_subs_epu16(absolute, halves((byte - kBelow) << 7));
    const __m512i last = _mm512_and_si512(_mm512_srli_epi16(scaled, bits == 4 ? 6 : 4), one);
    const __m512i sum = _mm512_add_epi16(_mm512_add_epi16(scaled, last), rounder);
    const __m512i rounded = _mm512_srli_epi16(sum, bits == 4 ? 6 : 4);
    const __mmask32 nan = _mm512_cmpgt_epu16_mask(absolute, infinity);
    if (bits == 4) {
      if (__builtin_expect(nan != 0, 0)) return false;
      // Below 1.0: count the steps of 1/2.
      const __m512i some = _mm512_maskz_mov_epi16(_mm512_cmpgt_epu16_mask(scaled, quarter), one);
      const __m512i small = _mm512_mask_add_epi16(some, _mm512_cmpge_epu16_mask(scaled, three_quarters), some, one);
      const __m512i codes = _mm512_mask_min_epu16(small, _mm512_cmpge_epu16_mask(scaled, least), rounded, greatest);
      const __m512i with_sign = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(stored, 12), sign, kOrWithin);
      store_bytes(out, _mm512_or_si512(with_sign, _mm512_srli_epi32(with_sign, 12)));
    } else {
      const __mmask32 some = _mm512_test_epi16_mask(absolute, absolute);
      const __mmask32 small = _mm512_mask_cmplt_epu16_mask(some, scaled, least);
      if (__builtin_expect((small | nan) != 0, 0)) return false;
      const __m512i codes = _mm512_maskz_min_epu16(some, rounded, greatest);
      const __m512i with_sign = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(stored, 8), sign, kOrWithin);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(with_sign));
    }
    return true;
  }
};

template <Element element, int bits>
static inline void encode_mx(const typename Reader<element>::Stored* x, int64_t groups, const uint32_t* byte, uint8_t* out) {
  constexpr int64_t width = bits == 4 ? 16 : 32;
  if constexpr (element == kBf16) {
    const Bf16Groups<bits> lanes;
    for (int64_t g = 0; g < groups; ++g) {
      if (__builtin_expect(lanes.encode(x + g * 32, byte[g], out + g * width), 1)) continue;
      encode_group<element, bits>(MxCodes<bits>{}, x + g * 32, byte[g], out + g * width);
    }
  } else {
    const MxCodes<bits> lanes;
    for (int64_t g = 0; g < groups; ++g) encode_group<element, bits>(lanes, x + g * 32, byte[g], out + g * width);
  }
}

template <Element element>
static inline void encode_nvfp4(const typename Reader<element>::Stored* x, int64_t groups, const float* step, uint8_t* out) {
  const E2m1Codes lanes;
  for (int64_t g = 0; g < groups; ++g) {
    const __m512i codes = lanes.of(_mm512_div_ps(load_floats<element>(x + g * 16), _mm512_set1_ps(step[g])));
    store_pairs(out + g * 8, step[g] == 0.0f ? _mm512_setzero_si512() : codes);
  }
}

// ---- decoding ---------------------------------------------------------------------------------------------------

// Magnitudes of codes as bf16: e4m3 with its NaN, e2m1 with both signs.
struct CodeTables {
  alignas(64) uint16_t e4m3[128];
  alignas(64) uint16_t e2m1[32];
};

constexpr CodeTables code_tables() {
  CodeTables tables{};
  for (uint32_t code = 0; code < 128; ++code) {
    // A subnormal code is an integer times 2^-9; its highest bit becomes the hidden one.
    const uint32_t top = code < 2 ? 0 : (code < 4 ? 1 : 2);
    const uint32_t small = code == 0 ? 0 : ((118 + top) << 7) + ((code << (7 - top)) & 0x7fu);
    tables.e4m3[code] = static_cast<uint16_t>(code == 127 ? 0x7fc0u : (code < 8 ? small : (code << 4) + (120u << 7)));
  }
  for (uint32_t code = 0; code < 32; ++code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t value = magnitude == 0 ? 0u : (magnitude == 1 ? 126u << 7 : (magnitude << 6) + (126u << 7));
    tables.e2m1[code] = static_cast<uint16_t>(value | ((code & 8u) << 12));
  }
  return tables;
}

static constexpr CodeTables kCodes = code_tables();

// 32 codes as bf16.
template <Element element>
static inline __m512i code_values(const uint8_t* codes) {
  if constexpr (element == kE2m1) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i index = _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), words(0xf000f), kWithinOr);
    return _mm512_permutexvar_epi16(index, _mm512_load_si512(kCodes.e2m1));
  } else {
    const __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(kCodes.e4m3), index, _mm512_load_si512(kCodes.e4m3 + 32));
    const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(kCodes.e4m3 + 64), index, _mm512_load_si512(kCodes.e4m3 + 96));
    const __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(index, halves(0x40)), high);
    return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(index, 8), halves(0x8000), kOrWithin);
  }
}

// bf16 in the high halves of the lanes: rounded, ties to even; NaN is kept.
static inline __m512i rounded_to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), words(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, last), words(0x7fff)), 16);
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), words(0x7fc0));
}

// 32 bf16 values times the scales of their halves, to out.
template <class Writer>
static inline void store_scaled(__m512i values, __m512 first, __m512 second, typename Writer::Stored* out) {
  if constexpr (sizeof(typename Writer::Stored) == 2 && !Writer::kIsF16) {
    // Unpacking mixes the 16-byte parts as packing puts them back: one scale for all, or parts put in order before.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), back = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i mixed = _mm512_permutexvar_epi64(order, values), zero = _mm512_setzero_si512();
    const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, mixed)), first);
    const __m512 high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, mixed)), second);
    const __m512i packed = _mm512_packus_epi32(rounded_to_bf16(low), rounded_to_bf16(high));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi64(back, packed));
  } else {
    const __m512i low = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(values)), 16);
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(values, 1)), 16);
    const __m512 x = _mm512_mul_ps(_mm512_castsi512_ps(low), first), y = _mm512_mul_ps(_mm512_castsi512_ps(high), second);
    if constexpr (sizeof(typename Writer::Stored) == 4) {
      _mm512_storeu_ps(out, x);
      _mm512_storeu_ps(out + 16, y);
    } else {
      __m256i* halves_out = reinterpret_cast<__m256i*>(out);
      _mm256_storeu_si256(halves_out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      _mm256_storeu_si256(halves_out + 1, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
}

template <Element element, class Writer>
static inline void decode_bytes(const uint8_t* codes, int64_t count, float scale, typename Writer::Stored* out) {
  int64_t i = 0;
  if constexpr (element == kE4m3) {
    const __m512 by = _mm512_set1_ps(scale);
    for (; i + 32 <= count; i += 32) store_scaled<Writer>(code_values<kE4m3>(codes + i), by, by, out + i);
  }
  portable::decode_bytes<element, Writer>(codes + i, count - i, scale, out + i);
}

template <Element element, int size, class Writer>
static inline void decode_groups(const uint8_t* codes, int64_t groups, const float* scale, typename Writer::Stored* out) {
  static_assert(element == kE2m1 || element == kE4m3);
  constexpr int64_t bytes = element == kE2m1 ? 16 : 32;
  int64_t at = 0;
  for (; (at + 1) * 32 <= groups * size; ++at) {
    const __m512 first = _mm512_set1_ps(scale[at * 32 / size]), second = _mm512_set1_ps(scale[(at * 32 + 16) / size]);
    store_scaled<Writer>(code_values<element>(codes + at * bytes), first, second, out + at * 32);
  }
  const int64_t done = at * 32 / size;
  portable::decode_groups<element, size, Writer>(codes + at * bytes, groups - done, scale + done, out + at * 32);
}

template <Element element, class Writer>
static inline void decode_mx(const uint8_t* codes, int64_t groups, const uint8_t* byte, typename Writer::Stored* out) {
  constexpr int64_t bytes = element == kE2m1 ? 16 : 32;
  constexpr bool is_bf16 = sizeof(typename Writer::Stored) == 2 && !Writer::kIsF16;
  for (int64_t g = 0; g < groups; ++g) {
    const __m512i values = code_values<element>(codes + g * bytes);
    // Every product is a normal bf16 here, so that the scale only shifts the exponent of what is neither 0 nor NaN.
    if (is_bf16 && byte[g] >= 16 && byte[g] <= 240) {
      const __m512i magnitude = _mm512_and_si512(values, halves(0x7fff));
      __mmask32 moved = _mm512_test_epi16_mask(magnitude, magnitude);
      if (element == kE4m3) moved = _mm512_mask_cmplt_epu16_mask(moved, magnitude, halves(0x7f80));
      const __m512i shift = halves((static_cast<uint32_t>(byte[g]) - 127u) << 7);
      _mm512_storeu_si512(out + g * 32, _mm512_mask_add_epi16(values, moved, values, shift));
    } else {
      const __m512 scale = _mm512_set1_ps(decode_e8m0(byte[g]));
      store_scaled<Writer>(values, scale, scale, out + g * 32);
    }
  }
}
