// Host kernels, built once per instruction set; which one runs is decided when the library is loaded.
#pragma once

#include "../job.h"

namespace qk {

// Units of an item that threads share out: rows, or stripes of 128 rows for per-block FP8.
int64_t cpu_units(const Job& job, const Item& item);

// Convert units [begin, end) of an item.
using CpuRange = void (*)(const Job& job, const Item& item, int64_t begin, int64_t end);

namespace baseline {
void convert_range(const Job& job, const Item& item, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void convert_range(const Job& job, const Item& item, int64_t begin, int64_t end);
}
namespace avx512 {
void convert_range(const Job& job, const Item& item, int64_t begin, int64_t end);
}
#endif

// Instruction set of this machine: 0 baseline, 1 AVX2, 2 AVX-512; never more than `limit`.
int cpu_level(int limit);
CpuRange cpu_kernels(int level);

}  // namespace qk
