// Which build of the host kernels runs on this machine.

#include "kernels.h"

namespace qk {

int64_t cpu_units(const Job& job, const Item& item) {
  return item.e * (job.target == kPerBlockFp8 ? (item.n + 127) / 128 : item.n);
}

int cpu_level(int limit) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const int found = avx2 ? (avx512 ? 2 : 1) : 0;
#else
  const int found = 0;
#endif
  return found < limit ? found : limit;
}

CpuRange cpu_kernels([[maybe_unused]] int level) {
#if defined(__x86_64__) && !defined(QK_EMULATE)
  if (level == 2) return avx512::convert_range;
  if (level == 1) return avx2::convert_range;
#endif
  return baseline::convert_range;
}

}  // namespace qk
