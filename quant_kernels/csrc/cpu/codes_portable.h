// Codes of rows on any machine: flat loops over conversions.h that the compiler vectorizes. codes_avx512.h has the same
// functions, bit for bit, for machines with AVX-512.

// ---- maxima -----------------------------------------------------------------------------------------------------

// Greatest magnitudes of groups of `size` (16 or 32) values, as fp32 bits.
template <Element element, int size>
static inline void group_maxima(const typename Reader<element>::Stored* x, int64_t groups, uint32_t* amax) {
  for (int64_t g = 0; g < groups; ++g) amax[g] = Reader<element>::amax(x + g * size, size);
}

// ---- encoding ---------------------------------------------------------------------------------------------------

// e4m3 codes of value / scale. Without `with_nan` no value is NaN, which some machines make use of.
template <Element element, bool fnuz, bool with_nan>
static inline void encode_divided(const typename Reader<element>::Stored* x, int64_t count, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float ratio = Reader<element>::value(x[i]) / scale;
    codes[i] = static_cast<uint8_t>(fnuz ? encode_e4m3fnuz(ratio) : encode_e4m3(ratio));
  }
}

// Two codes of 4 bits from two bytes: element 2i in the low nibble.
static inline void pack_nibbles(const uint8_t* codes, int64_t pairs, uint8_t* packed) {
  for (int64_t i = 0; i < pairs; ++i) {
    uint16_t pair;
    memcpy(&pair, codes + 2 * i, 2);
    packed[i] = static_cast<uint8_t>(pair | (pair >> 4));
  }
}

// Codes of at most kChunk / 32 groups of 32 under E8M0 scales: e4m3 one a byte, e2m1 in pairs.
template <Element element, int bits>
static inline void encode_mx(const typename Reader<element>::Stored* x, int64_t groups, const uint32_t* byte, uint8_t* out) {
  alignas(64) uint8_t unpacked[kChunk];
  uint8_t* codes = bits == 4 ? unpacked : out;
  for (int64_t g = 0; g < groups; ++g) {
    const auto* group = x + g * 32;
    const float factor = inverse_e8m0(byte[g]);
    for (int64_t i = 0; i < 32; ++i) {
      const float scaled = Reader<element>::value(group[i]) * factor;
      codes[g * 32 + i] = static_cast<uint8_t>(bits == 4 ? encode_e2m1(scaled) : encode_e4m3(scaled));
    }
  }
  if (bits == 4) pack_nibbles(unpacked, groups * 16, out);
}

// Pairs of e2m1 codes of at most kChunk / 16 groups of 16, value / step; 0 where the step is 0.
template <Element element>
static inline void encode_nvfp4(const typename Reader<element>::Stored* x, int64_t groups, const float* step, uint8_t* out) {
  alignas(64) uint8_t unpacked[kChunk];
  for (int64_t g = 0; g < groups; ++g) {
    const auto* group = x + g * 16;
    const float by = step[g];
#pragma GCC unroll 1
    for (int64_t i = 0; i < 16; ++i) {
      unpacked[g * 16 + i] = static_cast<uint8_t>(nvfp4_code(Reader<element>::value(group[i]), by));
    }
  }
  pack_nibbles(unpacked, groups * 8, out);
}

// ---- decoding ---------------------------------------------------------------------------------------------------

// Codes one a byte, `count` of them under one scale.
template <Element element, class Writer>
static inline void decode_bytes(const uint8_t* codes, int64_t count, float scale, typename Writer::Stored* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = element == kE4m3   ? decode_e4m3(codes[i])
                        : element == kE2m1 ? decode_e2m1(codes[i])
                                           : decode_e4m3fnuz(codes[i]);
    out[i] = Writer::store(value * scale);
  }
}

// Two 4-bit codes of a byte to two bytes.
static inline void unpack_nibbles(const uint8_t* packed, int64_t pairs, uint8_t* codes) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint16_t pair = static_cast<uint16_t>((packed[i] & 15u) | ((packed[i] & 0xf0u) << 4));
    memcpy(codes + 2 * i, &pair, 2);
  }
}

// Groups of 32 or 16 codes, packed if they are of 4 bits, each under its own scale. 16: scales are spread over the
// elements, for the groups are too short for loops of their own.
template <Element element, int size, class Writer>
static inline void decode_groups(const uint8_t* codes, int64_t groups, const float* scale, typename Writer::Stored* out) {
  constexpr int64_t run = 512 / size;
  alignas(64) uint8_t unpacked[512];
  alignas(64) float scales[512];
  for (int64_t first = 0; first < groups; first += run) {
    const int64_t live = groups - first < run ? groups - first : run;
    const uint8_t* bytes = codes + first * size;
    if (element == kE2m1) {
      unpack_nibbles(codes + first * size / 2, live * size / 2, unpacked);
      bytes = unpacked;
    }
    if (size == 32) {
      for (int64_t g = 0; g < live; ++g) {
        decode_bytes<element, Writer>(bytes + g * size, size, scale[first + g], out + (first + g) * size);
      }
    } else {
      for (int64_t g = 0; g < live; ++g) {
        for (int64_t i = 0; i < size; ++i) scales[g * size + i] = scale[first + g];
      }
      for (int64_t i = 0; i < live * size; ++i) {
        const float value = element == kE2m1 ? decode_e2m1(bytes[i]) : decode_e4m3(bytes[i]);
        out[first * size + i] = Writer::store(value * scales[i]);
      }
    }
  }
}

// The same under E8M0 scales given as bytes.
template <Element element, class Writer>
static inline void decode_mx(const uint8_t* codes, int64_t groups, const uint8_t* byte, typename Writer::Stored* out) {
  float scale[16];
  for (int64_t first = 0; first < groups; first += 16) {
    const int64_t live = groups - first < 16 ? groups - first : 16;
    for (int64_t g = 0; g < live; ++g) scale[g] = decode_e8m0(byte[first + g]);
    decode_groups<element, 32, Writer>(codes + first * (element == kE2m1 ? 16 : 32), live, scale, out + first * 32);
  }
}
