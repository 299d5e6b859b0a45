// The kernels that checks compile for AMD GPUs and interpreters run, under plain names. Each takes one WorkList by value.
//
//   rows_DTYPE_Kn        PTPC, K up to n          groups_DTYPE_TARGET      MXFP4, MXFP8, NVFP4
//   blocks_DTYPE         128 x 128 FP8            dense_SOURCE_DTYPE       dequantization
//   amax_DTYPE           one maximum a matrix     ..._careful              any strides, any length

#include "rows.cu"
#include "groups.cu"
#include "blocks.cu"
#include "dense.cu"
#include "matrix_amax.cu"

using namespace qk;

#define KERNEL(name, threads, ...) \
  extern "C" QK_GLOBAL void QK_LAUNCH_BOUNDS(threads) name(QK_ARGUMENT WorkList list) { __VA_ARGS__(list); }

KERNEL(rows_bf16_K256, 256, rows_block<PlainLoader<kBf16, 8>, 8, 4, false>)
KERNEL(rows_bf16_K2048, 256, rows_block<PlainLoader<kBf16, 8>, 32, 8, false>)
KERNEL(rows_bf16_K8192, 256, rows_block<PlainLoader<kBf16, 8>, 128, 8, false>)
KERNEL(rows_bf16_K2048_measured, 256, rows_block<PlainLoader<kBf16, 8>, 32, 8, true>)
KERNEL(rows_f16_K2048, 256, rows_block<PlainLoader<kF16, 8>, 32, 8, false>)
KERNEL(rows_f32_K1024, 256, rows_block<PlainLoader<kF32, 4>, 32, 8, false>)
KERNEL(rows_fp8_K8192, 256, rows_block<EncodedLoader<kE4m3, kBf16, 16>, 128, 4, false>)
KERNEL(rows_bf16_careful, 256, rows_block<CarefulLoader<kBf16, 8>, 256, 0, false>)
KERNEL(rows_f32_careful, 256, rows_block<CarefulLoader<kF32, 8>, 256, 0, false>)

KERNEL(groups_bf16_mxfp4, 256, groups_block<PlainLoader<kBf16, 8>, kMxfp4, 32, false>)
KERNEL(groups_bf16_mxfp8, 256, groups_block<PlainLoader<kBf16, 8>, kMxfp8, 32, false>)
KERNEL(groups_bf16_nvfp4, 256, groups_block<PlainLoader<kBf16, 8>, kNvfp4, 16, false>)
KERNEL(groups_f16_mxfp4, 256, groups_block<PlainLoader<kF16, 8>, kMxfp4, 32, false>)
KERNEL(groups_f32_mxfp4, 256, groups_block<PlainLoader<kF32, 8>, kMxfp4, 32, false>)
KERNEL(groups_f32_mxfp8, 256, groups_block<PlainLoader<kF32, 8>, kMxfp8, 32, false>)
KERNEL(groups_fp8_mxfp4, 256, groups_block<EncodedLoader<kE4m3, kBf16, 8>, kMxfp4, 32, false>)
KERNEL(groups_bf16_mxfp4_measured, 256, groups_block<PlainLoader<kBf16, 8>, kMxfp4, 32, true>)
KERNEL(groups_bf16_mxfp4_careful, 256, groups_block<CarefulLoader<kBf16, 8>, kMxfp4, 32, false>)

KERNEL(blocks_bf16, 256, tile_block<PlainLoader<kBf16, 8>, false>)
KERNEL(blocks_f32, 256, tile_block<PlainLoader<kF32, 8>, false>)
KERNEL(blocks_bf16_careful, 256, tile_block<CarefulLoader<kBf16, 8>, false>)

KERNEL(dense_fp8_bf16, 256, dense_block<EncodedLoader<kE4m3, kBf16, 8>>)
KERNEL(dense_fp4_bf16, 256, dense_block<EncodedLoader<kE2m1, kBf16, 8>>)
KERNEL(dense_any_f32, 256, dense_block<CarefulLoader<kF32, 8>>)

KERNEL(amax_bf16, 256, matrix_amax_block<PlainLoader<kBf16, 8>>)
