// e4m3 codes that lie under one scale, turned into other codes without being decoded.
//
// Under a scale s the magnitude code c = 8 E + m stands for bf16(m') 2^E, m' being one of 8 numbers: rounding to bf16 commutes
// with powers of two as long as nothing is subnormal. What a target makes of the value is a function of c with at most a few
// steps in each octave, and the same steps in every octave. So a scale's steps are found once, in integers, and its codes are
// converted four a word. Codes of the lowest octave are subnormal: they are not covered, nor are unusual scales.
#pragma once

#include "encode.h"

namespace qk {

constexpr uint32_t kEachByte = 0x01010101u, kHighBits = 0x80808080u, kSevenBits = 0x7f7f7f7fu;

// The same number in each byte; negative ones too, as long as what they are added to stays within its byte.
QK_DEVICE uint32_t in_each_byte(int value) { return static_cast<uint32_t>(value) * kEachByte; }

// Bits of `a` where the mask has ones, of `b` elsewhere.
QK_DEVICE uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(found) : "r"(mask), "r"(a), "r"(b));
  return found;
#else
  return (a & mask) | (b & ~mask);
#endif
}

QK_DEVICE int count_bits(uint32_t word) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Bytes 0 and 2 of `a`, then those of `b`.
QK_DEVICE uint32_t even_bytes(uint32_t a, uint32_t b) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x6420);
#else
  return (a & 0xffu) | ((a >> 8) & 0xff00u) | ((b & 0xffu) << 16) | ((b << 8) & 0xff000000u);
#endif
}

// Bytes 1 and 3.
QK_DEVICE uint32_t odd_bytes(uint32_t a, uint32_t b) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x7531);
#else
  return even_bytes(a >> 8, b >> 8);
#endif
}

// For each byte of `indices` (0 ... 7) that byte of a table.
QK_DEVICE uint32_t look_up(uint32_t low, uint32_t high, uint32_t indices) {
#if defined(QK_CUDA) && defined(__CUDA_ARCH__)
  // The product has indices 0 and 1 in the nibbles of byte 1, indices 2 and 3 in those of byte 3.
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(__byte_perm(indices * 0x110u, 0u, 0x4431)));
  return found;
#elif defined(QK_HIP) && defined(__AMDGCN__)
  return __builtin_amdgcn_perm(high, low, indices);
#else
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t index = (indices >> (8 * i)) & 7u;
    found |= (((index < 4 ? low : high) >> (index % 4 * 8)) & 0xffu) << (8 * i);
  }
  return found;
#endif
}

// Greatest of 16 codes whose high bits are set, without that bit.
QK_DEVICE uint32_t greatest_raised(const uint32_t (&codes)[4]) {
  uint32_t low = 0, high = 0;
  for (int i = 0; i < 4; ++i) {
    low = max_halves(low, codes[i] & 0x00ff00ffu);
    high = max_halves(high, codes[i]);  // its upper bytes decide
  }
  const uint32_t both = max_halves(low, (high >> 8) & 0x00ff00ffu);
  return max_u32(both >> 16, both & 0xffffu) & 0x7fu;
}

// Greatest magnitude of 16 codes.
QK_DEVICE uint32_t greatest_code(const Words4& codes) {
  return greatest_raised({codes.w[0] | kHighBits, codes.w[1] | kHighBits, codes.w[2] | kHighBits, codes.w[3] | kHighBits});
}

// Whether a scale is far enough from both ends of fp32 for all that follows.
QK_DEVICE bool usual_scale(float scale) { return bits_of(scale) - (27u << 23) < (200u << 23); }

// The bf16 patterns of the 8 values of an octave under a scale: octave 0, taken as if its codes were normal numbers.
struct Octave {
  uint32_t low, high;  // how far the patterns are above the first one, a byte each
  int first;

  QK_DEVICE_MEMBER explicit Octave(float scale) {
    uint32_t pairs[4];
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack_bf16(static_cast<float>(8 + 2 * i) * 0.0009765625f * scale,
                           static_cast<float>(9 + 2 * i) * 0.0009765625f * scale);
    }
    const uint32_t base = (pairs[0] & 0xffffu) * 0x00010001u;
    first = static_cast<int>(pairs[0] & 0xffffu);
    low = even_bytes(pairs[0] - base, pairs[1] - base);
    high = even_bytes(pairs[2] - base, pairs[3] - base);
  }

  // The first code whose value has the given pattern or a greater one. An octave is 8 codes and 128 patterns.
  QK_DEVICE_MEMBER int reaching(int pattern) const {
    const int ahead = pattern - first, octave = (ahead + 127) >> 7;
    const uint32_t wanted = in_each_byte(ahead - 128 * (octave - 1));  // 1 ... 128
    const uint32_t there = ((((low | kHighBits) - wanted) & kHighBits) >> 1) | (((high | kHighBits) - wanted) & kHighBits);
    return 8 * octave - count_bits(there);
  }
};

}  // namespace qk
