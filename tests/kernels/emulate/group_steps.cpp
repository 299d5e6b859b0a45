// The thresholds of coded_groups.cu against the conversion of each code by its value: every code under every greatest code of
// its group, for scales with all kinds of mantissas and all roundings. Prints a closing count.

#include <stdio.h>

#include <random>

#include "coded_groups.cu"
#include "runtime.h"

using namespace qk;

namespace {

std::mt19937_64 numbers(3);
long cases = 0, failures = 0;

// A scale with an exponent that thresholds cover; some of few bits, as quotients of powers of two have, some at a bf16's ties.
float some_scale(int turn) {
  uint32_t bits = static_cast<uint32_t>(numbers() % 200 + 27) << 23 | static_cast<uint32_t>(numbers() & 0x7fffffu);
  if (turn % 4 == 1) bits &= ~0xfffffu;
  if (turn % 4 == 2) bits = (bits & ~0xffffu) | 0x8000u;
  return float_of(bits);
}

uint32_t by_value(uint32_t code, float scale, uint32_t byte) {
  return encode_e2m1(bf16_to_float(static_cast<uint16_t>(float_to_bf16(decode_e4m3(code) * scale))) * inverse_e8m0(byte));
}

void check(float scale, int rounding) {
  const uint32_t added = scale_rounding_bits(rounding, 4);
  const Thresholds thresholds(scale, added);
  for (uint32_t greatest = kLeastCode; greatest <= kGreatestCode; ++greatest) {
    const uint32_t byte = e8m0_of_amax(float_to_bf16(decode_e4m3(greatest) * scale) << 16, added, 2u);
    const int height = static_cast<int>(greatest) - thresholds.rising;
    const GroupThresholds group(thresholds, height);
    failures += static_cast<uint32_t>((height >> 3) - 2) != byte;
    for (uint32_t first = 0; first <= greatest; first += 8) {
      uint32_t codes[2] = {0, 0}, wanted = 0;  // the even and the odd ones
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t code = (first + i <= greatest ? first + i : 0) | ((first + 3 * i) % 5 < 2 ? 0x80u : 0u);
        codes[i % 2] |= code << (i / 2 * 8);
        wanted |= by_value(code, scale, byte) << (4 * i);
      }
      const uint32_t raised[2] = {codes[0] | kHighBits, codes[1] | kHighBits};
      ++cases;
      failures += encode_codes(codes, raised, thresholds, group) != wanted;
    }
  }
}

}  // namespace

int main() {
  for (int turn = 0; turn < 800; ++turn) check(some_scale(turn), turn % 3);
  printf("%ld cases, %ld failed\n", cases, failures);
  return failures != 0;
}
