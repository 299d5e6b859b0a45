// The linear product without matrix units, for up to 8 rows of x: what AMD GPUs run, and the host in tests.
//
// One launch makes x ready. In the second, groups of 32 lanes work on one row of the weight each: a lane
// decodes 16 bytes of codes and multiplies them with as many values of each row of x.
#pragma once

#include "linear.h"
#include "linear_x.h"

#if defined(QK_HIP) || defined(QK_EMULATE)

namespace qk {

constexpr int kPlainThreads = 256, kPlainRows = kPlainThreads / 32;

// The launch that makes x ready, one row a block.
QK_GLOBAL void QK_LAUNCH_BOUNDS(kPlainThreads) linear_x_kernel(QK_ARGUMENT LinearJob job) {
  QK_SHARED uint32_t of_waves[kPlainThreads / 32];
  const int64_t row = block_index();
  const uint16_t* x = static_cast<const uint16_t*>(job.x) + row * job.x_stride;
  uint32_t amax = 0;
  for (int64_t k = 8 * thread_index(); k < job.k; k += 8 * kPlainThreads) {
    amax = max_halves(amax, greatest_of(*reinterpret_cast<const Words4*>(x + k)));
  }
  amax = greatest_of_lanes(amax);
  if (thread_index() % 32 == 0) of_waves[thread_index() / 32] = amax;
  barrier();
  for (int i = 0; i < kPlainThreads / 32; ++i) amax = max_u32(amax, of_waves[i]);
  const RowOfX<true> rounder(job, amax);
  if (thread_index() == 0) job.factors[row] = rounder.factor;
  uint16_t* ready = job.ready_x + row * job.k;
  for (int64_t first = 0; first < job.k; first += 8 * kPlainThreads) {
    const int64_t k = first + 8 * thread_index();
    Words4 words{};
    if (k < job.k) words = *reinterpret_cast<const Words4*>(x + k);
    words = rounder.ready(words);
    if (k < job.k) store_ready(ready, k, job.format, words);
  }
}

// Codes of one lane, as fp32.
template <WeightFormat format, int count>
QK_DEVICE void decode_codes(float (&values)[count], const uint8_t* codes) {
  const Words4 words = load_once<Words4>(codes);
  for (int i = 0; i < count; ++i) {
    if constexpr (format == kGroupFp4) {
      values[i] = decode_e2m1((words.w[i / 8] >> (4 * (i % 8))) & 15u);
    } else {
      values[i] = decode_e4m3((words.w[i / 4] >> (8 * (i % 4))) & 255u);
    }
  }
}

template <WeightFormat format>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kPlainThreads) plain_linear_kernel(QK_ARGUMENT LinearJob job) {
  constexpr int kCodes = format == kGroupFp4 ? 32 : 16;
  const int lane = thread_index() % 32;
  const int64_t n = block_index() * kPlainRows + thread_index() / 32;
  const bool inside = n < job.n;
  const int64_t row = inside ? n : job.n - 1;
  const uint8_t* codes = job.w + row * job.w_stride;
  float sums[kPlainTokens] = {};
  for (int64_t k = kCodes * lane; k < job.k; k += 32 * kCodes) {
    float values[kCodes];
    decode_codes<format, kCodes>(values, codes + (format == kGroupFp4 ? k / 2 : k));
    float scale = 1.0f;
    if constexpr (format != kRowFp8) scale = decode_e8m0(static_cast<const uint8_t*>(job.scale)[row * job.scale_stride + k / 32]);
    for (int token = 0; token < kPlainTokens; ++token) {
      if (token >= job.m) break;
      const uint16_t* x = job.ready_x + token * job.k + k;
      float part = 0.0f;
      for (int i = 0; i < kCodes; i += 8) {
        const Words4 words = *reinterpret_cast<const Words4*>(x + i);
        for (int j = 0; j < 8; ++j) part = fused_multiply_add(values[i + j], x_value(kF16, words.w[j / 2], j & 1), part);
      }
      sums[token] = format == kRowFp8 ? sums[token] + part : fused_multiply_add(part, scale, sums[token]);
    }
  }
  for (int token = 0; token < kPlainTokens; ++token) {
    if (token >= job.m) break;
    float sum = sums[token];
    for (int distance = 16; distance > 0; distance /= 2) sum += float_of(shuffle_xor(bits_of(sum), distance));
    if (lane != 0 || !inside) continue;
    sum *= job.factors[token];
    if constexpr (format == kRowFp8) sum *= static_cast<const float*>(job.scale)[n * job.scale_stride];
    if (job.bias != nullptr) sum += x_value(job.element, static_cast<const uint16_t*>(job.bias)[n], 0);
    store_result(job, token * job.n + n, sum);
  }
}

}  // namespace qk

#endif
