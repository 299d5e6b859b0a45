// The product of a few rows of activations with a quantized weight: what the kernels are given.
#pragma once

#include "job.h"

namespace qk {

enum WeightFormat : int32_t { kRowFp8, kGroupFp8, kGroupFp4, kWeightFormats };  // PTPC FP8, MXFP8, MXFP4
enum Activation : int32_t { kAsIs, kPerTokenFp8, kGroupedFp8, kGroupedFp4, kActivations };

constexpr int kMostTokens = 16;  // rows of x that one product takes

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
  int32_t row_groups;    // groups of rows of w that one block works on: 1, 2, 4 or 8
  int32_t splits;        // blocks that share the input side: 1, 2, 4 or 8
  int32_t chunks;        // pieces of the input side, 128 bytes of codes each; filled by the launcher
  // Without matrix units x is made ready by a launch of its own: f16 [m, k], and [m].
  uint16_t* ready_x;
  float* factors;
};

constexpr int64_t kLongestInput = 28672;  // elements: what the shared memory of eight blocks holds of 16 rows of x
constexpr int kPlainTokens = 8;  // the same without matrix units

// Rows of x that one product takes on the current device; 0 if there is no kernel for it.
int64_t linear_tokens();

// Bytes that a job needs beside its operands.
int64_t linear_workspace(const LinearJob& job);

// Launch the product on `stream`; nullptr, or what went wrong. `workspace` is 16-byte aligned.
const char* linear_on_device(const LinearJob& job, void* workspace, int64_t stream);

}  // namespace qk
