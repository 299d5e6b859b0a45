// The tables of coded_rows.cu against the conversion of each code by its value: every code that a table holds for, under pairs
// of block and row scales. Prints a closing count.

#include <stdio.h>

#include <random>

#include "coded_rows.cu"
#include "runtime.h"

using namespace qk;

namespace {

std::mt19937_64 numbers(4);

float scale_near(int exponent, int turn) {
  uint32_t bits = static_cast<uint32_t>(exponent) << 23 | static_cast<uint32_t>(numbers() & 0x7fffffu);
  if (turn % 4 == 1) bits &= ~0xfffffu;
  if (turn % 4 == 2) bits = (bits & ~0xffffu) | 0x8000u;
  return float_of(bits);
}

}  // namespace

int main() {
  long cases = 0, failures = 0;
  for (int turn = 0; turn < 20000; ++turn) {
    const int exponent = static_cast<int>(numbers() % 160 + 47);
    const float block = scale_near(exponent, turn), row = scale_near(exponent - 10 + static_cast<int>(numbers() % 21), turn / 4);
    const Table table = table_of(block, row);
    for (uint32_t code = table.least & 0xffu; code < 127; ++code) {
      const float value = bf16_to_float(static_cast<uint16_t>(float_to_bf16(decode_e4m3(code) * block)));
      if (value / row > kE4m3Max) break;  // a row's greatest value is 448 times its scale
      const uint32_t found = (code | 0x80u) + (look_up(table.low, table.high, code & 7u) & 0xffu) + (table.first & 0xffu);
      ++cases;
      failures += (found & 0x7fu) != encode_e4m3(value / row);
    }
  }
  printf("%ld cases, %ld failed\n", cases, failures);
  return failures != 0;
}
