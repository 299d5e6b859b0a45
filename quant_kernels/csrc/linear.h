// The product of a few rows of activations with a quantized weight: what the kernels are given.
#pragma once

#include "job.h"

namespace qk {

enum WeightFormat : int32_t { kRowFp8, kGroupFp8, kGroupFp4, kWeightFormats };  // PTPC FP8, MXFP8, MXFP4
enum Activation : int32_t { kAsIs, kPerTokenFp8, kGroupedFp8, kGroupedFp4, kActivations };

// One launch, in which every block makes its part of x ready, or one for x and one for the product. `Early`: the (first)
// launch may be brought to the device before what precedes it has ended.
enum Way : int32_t { kChosen, kOneLaunch, kOneLaunchEarly, kTwoLaunches, kTwoLaunchesEarly, kWays };

constexpr int kMostTokens = 64;  // rows of x that one product takes

// y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n].
struct LinearJob {
  const void* x;         // 16-bit floats, rows 16-byte aligned
  const uint8_t* w;      // codes, rows 16-byte aligned
  const void* scale;     // fp32 [n], or E8M0 [n, k / 32]
  const void* bias;      // of the dtype of x, or null
  void* y;               // of the dtype of x, [m, n] without gaps
  int64_t x_stride;      // elements between rows
  int64_t w_stride;      // bytes between rows
  int64_t scale_stride;  // elements between rows
  int64_t n, k;
  int32_t m;
  Element element;       // of x, bias and y: kF16 or kBf16
  WeightFormat format;
  Activation activation;
  // How the work is cut (0: the launcher chooses).
  int32_t row_groups;    // groups of 16 rows of w that one block works on: 1, 2, 4 or 8
  int32_t splits;        // blocks that share the input side: 1, 2, 4 or 8
  Way way;
  // Between two launches: x as the second one reads it.
  uint16_t* ready_x;     // f16 [m, ready_stride], 16-byte aligned
  float* factors;        // [m]
  int64_t ready_stride;  // k, rounded up to whole chunks
  // Filled by the launcher.
  int32_t chunks;        // pieces of the input side, 128 bytes of codes each
  int32_t panel_chunks;  // pieces of x a warp keeps at once
};

// Elements of a chunk: what the input side is rounded up to between the launches.
constexpr int64_t elements_a_chunk(WeightFormat format) { return format == kGroupFp4 ? 256 : 128; }

// Bytes that a job needs between its launches: factors, then x.
constexpr int64_t linear_workspace(const LinearJob& job) {
  const int64_t chunk = elements_a_chunk(job.format);
  return 4 * kMostTokens + 2 * job.m * ((job.k + chunk - 1) / chunk * chunk);
}

// Whether there are kernels for so many rows of x.
bool linear_kernel_built(int64_t m);

// Launch the product on `stream`; nullptr, or what went wrong. `workspace` is 16-byte aligned.
const char* linear_on_device(LinearJob job, void* workspace, int64_t stream);

}  // namespace qk
