// The host kernels: flat loops over conversions.h that the compiler vectorizes. An including file defines QK_ISA, the
// namespace, and is compiled for that instruction set.

#include <stdlib.h>
#include <string.h>

#include "../conversions.h"
#include "../layout.h"
#include "kernels.h"

namespace qk {
namespace QK_ISA {
namespace {

#include "source_rows.h"

static inline void count_bad(const Item& item, int64_t row) {
  __atomic_fetch_add(item.bad, int64_t{1}, __ATOMIC_RELAXED);
  int64_t seen = __atomic_load_n(item.bad + 1, __ATOMIC_RELAXED);
  while (row < seen &&
         !__atomic_compare_exchange_n(item.bad + 1, &seen, row, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

static inline void check_amax(const Item& item, uint32_t amax, int64_t row) {
  if (item.bad != nullptr && amax >= kInfinity) count_bad(item, row);
}

static inline uint32_t given_amax(const Item& item, int64_t e, int64_t n, int64_t k) {
  return bits_of(*place<const float>(item.amax, e, n, k)) & kMagnitude;
}

// Ask for memory that is read soon: the next row while this one is encoded, whose loops leave the memory idle otherwise.
static inline void prefetch(const void* memory, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at);
}

// ---- error sums -------------------------------------------------------------------------------------------------

struct Sums {
  double squares = 0, errors = 0;

  // Codes here are one a byte; `bits` 4 or 8.
  template <Element element, int bits>
  inline void add(const typename Reader<element>::Stored* x, int64_t count, const uint8_t* codes, float scale,
                  bool fnuz) {
    constexpr int lanes = 16;
    float square[lanes] = {}, error[lanes] = {};
    for (int64_t i = 0; i < count; i += lanes) {
      const int64_t live = count - i < lanes ? count - i : lanes;
      for (int64_t lane = 0; lane < live; ++lane) {
        const float value = Reader<element>::value(x[i + lane]);
        const float code = bits == 4 ? decode_e2m1(codes[i + lane])
                                     : (fnuz ? decode_e4m3fnuz(codes[i + lane]) : decode_e4m3(codes[i + lane]));
        const float difference = value - code * scale;
        square[lane] += value * value;
        error[lane] += difference * difference;
      }
    }
    for (int lane = 0; lane < lanes; ++lane) {
      squares += static_cast<double>(square[lane]);
      errors += static_cast<double>(error[lane]);
    }
  }

  inline void write(const Item& item, int64_t row) const {
    item.sums[2 * row] = squares;
    item.sums[2 * row + 1] = errors;
  }
};

// ---- destinations -----------------------------------------------------------------------------------------------

// Bytes of a row of codes: its place in the output, or a buffer that finish_row() puts in CDNA order.
static inline uint8_t* code_row(const Job& job, const Item& item, int64_t e, int64_t n, int64_t width,
                                Scratch& scratch) {
  return job.layout == kCdna ? scratch.codes.of<uint8_t>(width) : place<uint8_t>(item.data, e, n, 0);
}

static inline void finish_row(const Job& job, const Item& item, int64_t e, int64_t n, int64_t width,
                              const uint8_t* codes) {
  if (job.layout != kCdna) return;
  uint8_t* matrix = place<uint8_t>(item.data, e, 0, 0);
  for (int64_t column = 0; column < width; column += 16) {
    memcpy(matrix + cdna_weight_offset(n, column, width), codes + column, 16);
  }
}

// The row after x, if rows are read where they lie.
template <class Stored>
static inline const Stored* next_row(const Job& job, const Item& item, const Stored* x) {
  return job.encoded || item.source.stride_k != 1 ? nullptr : x + item.source.stride_n;
}

// ---- rows -------------------------------------------------------------------------------------------------------

template <Element element>
static void ptpc_row(const Job& job, const Item& item, int64_t e, int64_t n, Scratch& scratch) {
  const auto* x = source_row<element>(job, item, e, n, scratch);
  const int64_t row = e * item.n + n;
  uint32_t amax = 0;
  if (item.amax.data == nullptr || item.bad != nullptr) amax = Reader<element>::amax(x, item.k);
  check_amax(item, amax, row);
  const bool finite = amax < kInfinity && item.amax.data == nullptr;
  if (item.amax.data != nullptr) amax = given_amax(item, e, n, 0);
  const float scale = fp32_scale(amax, job.fnuz ? kE4m3FnuzMax : kE4m3Max);
  *place<float>(item.scale, e, n, 0) = scale;
  uint8_t* codes = code_row(job, item, e, n, item.k, scratch);
  const auto* next = next_row(job, item, x);
  for (int64_t k = 0; k < item.k; k += kChunk) {
    const int64_t count = item.k - k < kChunk ? item.k - k : kChunk;
    if (next != nullptr) prefetch(next + k, count * static_cast<int64_t>(sizeof(*x)));
    if (job.fnuz) {
      encode_divided<element, true, true>(x + k, count, scale, codes + k);
    } else if (finite) {
      encode_divided<element, false, false>(x + k, count, scale, codes + k);
    } else {
      encode_divided<element, false, true>(x + k, count, scale, codes + k);
    }
  }
  if (item.sums != nullptr) {
    Sums sums;
    for (int64_t k = 0; k < item.k; k += kChunk) {
      sums.add<element, 8>(x + k, item.k - k < kChunk ? item.k - k : kChunk, codes + k, scale, job.fnuz);
    }
    sums.write(item, row);
  }
  finish_row(job, item, e, n, item.k, codes);
}

template <Element element, int bits>
static void mx_row(const Job& job, const Item& item, int64_t e, int64_t n, Scratch& scratch) {
  constexpr int64_t groups_a_chunk = kChunk / 32;
  const auto* x = source_row<element>(job, item, e, n, scratch);
  const int64_t row = e * item.n + n, groups = item.k / 32, width = bits == 4 ? item.k / 2 : item.k;
  const uint32_t rounding = scale_rounding_bits(job.rounding, bits);
  uint8_t* out = code_row(job, item, e, n, width, scratch);
  uint8_t* scales = place<uint8_t>(item.scale, e, job.layout == kCdna ? 0 : n, 0);
  Sums sums;
  for (int64_t first = 0; first < groups; first += groups_a_chunk) {
    const int64_t count = groups - first < groups_a_chunk ? groups - first : groups_a_chunk;
    const auto* chunk = x + first * 32;
    if (!job.encoded) prefetch(chunk + 2 * kChunk, kChunk * static_cast<int64_t>(sizeof(*chunk)));
    uint32_t amax[groups_a_chunk] = {}, byte[groups_a_chunk];
    if (item.amax.data == nullptr || item.bad != nullptr) group_maxima<element, 32>(chunk, count, amax);
    if (item.bad != nullptr) {
      for (int64_t g = 0; g < count; ++g) check_amax(item, amax[g], row);
    }
    if (item.amax.data != nullptr) {
      for (int64_t g = 0; g < count; ++g) amax[g] = given_amax(item, e, n, first + g);
    }
    for (int64_t g = 0; g < groups_a_chunk; ++g) byte[g] = e8m0_of_amax(amax[g], rounding, bits == 4 ? 2u : 8u);
    if (job.layout == kCdna) {
      for (int64_t g = 0; g < count; ++g) scales[cdna_scale_offset(n, first + g, item.scale_k)] = static_cast<uint8_t>(byte[g]);
    } else {
      for (int64_t g = 0; g < count; ++g) scales[first + g] = static_cast<uint8_t>(byte[g]);
    }
    uint8_t* codes = out + first * (bits == 4 ? 16 : 32);
    encode_mx<element, bits>(chunk, count, byte, codes);
    if (item.sums != nullptr) {
      alignas(64) uint8_t unpacked[kChunk];
      if (bits == 4) unpack_nibbles(codes, count * 16, unpacked);
      const uint8_t* single = bits == 4 ? unpacked : codes;
      for (int64_t g = 0; g < count; ++g) {
        sums.add<element, bits>(chunk + g * 32, 32, single + g * 32, decode_e8m0(byte[g]), false);
      }
    }
  }
  if (item.sums != nullptr) sums.write(item, row);
  finish_row(job, item, e, n, width, out);
}

template <Element element>
static void nvfp4_row(const Job& job, const Item& item, int64_t e, int64_t n, Scratch& scratch) {
  constexpr int64_t groups_a_chunk = kChunk / 16;
  const auto* x = source_row<element>(job, item, e, n, scratch);
  const int64_t row = e * item.n + n, groups = item.k / 16, width = item.k / 2;
  const float second = nvfp4_second_scale(given_amax(item, e, 0, 0));
  if (n == 0) *place<float>(item.second, e, 0, 0) = second;
  uint8_t* out = code_row(job, item, e, n, width, scratch);
  uint8_t* scales = place<uint8_t>(item.scale, e, n, 0);
  Sums sums;
  for (int64_t first = 0; first < groups; first += groups_a_chunk) {
    const int64_t count = groups - first < groups_a_chunk ? groups - first : groups_a_chunk;
    const auto* chunk = x + first * 16;
    uint32_t amax[groups_a_chunk] = {}, code[groups_a_chunk];
    float step[groups_a_chunk];
    group_maxima<element, 16>(chunk, count, amax);
    if (item.bad != nullptr) {
      for (int64_t g = 0; g < count; ++g) check_amax(item, amax[g], row);
    }
    for (int64_t g = 0; g < groups_a_chunk; ++g) {
      code[g] = nvfp4_scale(amax[g], second);
      step[g] = decode_e4m3(code[g]) * second;
    }
    for (int64_t g = 0; g < count; ++g) scales[first + g] = static_cast<uint8_t>(code[g]);
    encode_nvfp4<element>(chunk, count, step, out + first * 8);
    if (item.sums != nullptr) {
      alignas(64) uint8_t unpacked[kChunk];
      unpack_nibbles(out + first * 8, count * 8, unpacked);
      for (int64_t g = 0; g < count; ++g) sums.add<element, 4>(chunk + g * 16, 16, unpacked + g * 16, step[g], false);
    }
  }
  if (item.sums != nullptr) sums.write(item, row);
  finish_row(job, item, e, n, width, out);
}

template <Element element>
static void block_stripe(const Job& job, const Item& item, int64_t e, int64_t stripe, Scratch& scratch) {
  const int64_t first = stripe * 128, last = first + 128 < item.n ? first + 128 : item.n;
  const int64_t tiles = (item.k + 127) / 128;
  uint32_t* amax = scratch.tile_amax.of<uint32_t>(tiles);
  float* scale = scratch.tile_scale.of<float>(tiles);
  for (int64_t tile = 0; tile < tiles; ++tile) amax[tile] = 0;
  if (item.amax.data == nullptr || item.bad != nullptr) {
    int64_t* bad_row = scratch.tile_row.of<int64_t>(tiles);
    for (int64_t tile = 0; tile < tiles; ++tile) bad_row[tile] = -1;
    for (int64_t n = first; n < last; ++n) {
      const auto* x = source_row<element>(job, item, e, n, scratch);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t count = item.k - tile * 128 < 128 ? item.k - tile * 128 : 128;
        const uint32_t found = Reader<element>::amax(x + tile * 128, count);
        if (found >= kInfinity && bad_row[tile] < 0) bad_row[tile] = e * item.n + n;
        amax[tile] = max_u32(amax[tile], found);
      }
    }
    for (int64_t tile = 0; tile < tiles; ++tile) check_amax(item, amax[tile], bad_row[tile]);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (item.amax.data != nullptr) amax[tile] = given_amax(item, e, stripe, tile);
    scale[tile] = fp32_scale(amax[tile], kE4m3Max);
    *place<float>(item.scale, e, stripe, tile) = scale[tile];
  }
  for (int64_t n = first; n < last; ++n) {
    const auto* x = source_row<element>(job, item, e, n, scratch);
    uint8_t* codes = code_row(job, item, e, n, item.k, scratch);
    Sums sums;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t k = tile * 128, count = item.k - k < 128 ? item.k - k : 128;
      encode_divided<element, false, true>(x + k, count, scale[tile], codes + k);
      if (item.sums != nullptr) sums.add<element, 8>(x + k, count, codes + k, scale[tile], false);
    }
    if (item.sums != nullptr) sums.write(item, e * item.n + n);
    finish_row(job, item, e, n, item.k, codes);
  }
}

// Greatest magnitudes of blocks; blocks of several rows were set to zero before.
template <Element element>
static void amax_row(const Job& job, const Item& item, int64_t e, int64_t n, Scratch& scratch) {
  const auto* x = source_row<element>(job, item, e, n, scratch);
  for (int64_t k = 0, column = 0; k < item.k; k += job.amax_cols, ++column) {
    const int64_t count = item.k - k < job.amax_cols ? item.k - k : job.amax_cols;
    const uint32_t found = Reader<element>::amax(x + k, count);
    uint32_t* out = place<uint32_t>(item.scale, e, n / job.amax_rows, column);
    const uint32_t amax = found > kInfinity ? kQuietNan : found;
    if (job.amax_rows == 1) {
      *out = amax;
      continue;
    }
    uint32_t seen = __atomic_load_n(out, __ATOMIC_RELAXED);
    while (amax > seen && !__atomic_compare_exchange_n(out, &seen, amax, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

static void dense_row(const Job& job, const Item& item, int64_t e, int64_t n, Scratch& scratch) {
  const int64_t width = job.element == kE2m1 ? item.k / 2 : item.k;
  const uint8_t* codes = contiguous_row<uint8_t>(item.source, e, n, width, scratch);
  if (job.through == kF32) decode_row<Dense<kF32>>(job, item, e, n, codes, place<float>(item.data, e, n, 0));
  if (job.through == kF16) decode_row<Dense<kF16>>(job, item, e, n, codes, place<uint16_t>(item.data, e, n, 0));
  if (job.through == kBf16) decode_row<Dense<kBf16>>(job, item, e, n, codes, place<uint16_t>(item.data, e, n, 0));
}

template <Element element>
static void convert_units(const Job& job, const Item& item, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const int64_t units_a_matrix = job.target == kPerBlockFp8 ? (item.n + 127) / 128 : item.n;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t e = unit / units_a_matrix, n = unit % units_a_matrix;
    switch (job.target) {
      case kDense: dense_row(job, item, e, n, scratch); break;
      case kPtpcFp8: ptpc_row<element>(job, item, e, n, scratch); break;
      case kMxfp4: mx_row<element, 4>(job, item, e, n, scratch); break;
      case kMxfp8: mx_row<element, 8>(job, item, e, n, scratch); break;
      case kPerBlockFp8: block_stripe<element>(job, item, e, n, scratch); break;
      case kNvfp4: nvfp4_row<element>(job, item, e, n, scratch); break;
      case kAmax: amax_row<element>(job, item, e, n, scratch); break;
    }
  }
}

}  // namespace

void convert_range(const Job& job, const Item& item, int64_t begin, int64_t end) {
  const Element element = job.encoded ? job.through : job.element;
  if (element == kF32) convert_units<kF32>(job, item, begin, end);
  if (element == kF16) convert_units<kF16>(job, item, begin, end);
  if (element == kBf16) convert_units<kBf16>(job, item, begin, end);
}

}  // namespace QK_ISA
}  // namespace qk
