// What a conversion is asked to do: plain data that the operator fills and kernels on every device read.
#pragma once

#include <stdint.h>

namespace qk {

enum Target : int32_t { kDense, kPtpcFp8, kMxfp4, kMxfp8, kPerBlockFp8, kNvfp4, kAmax };
enum Rounding : int32_t { kEven, kFloor, kRceil };
enum Layout : int32_t { kRowMajor, kCdna };
// Elements of a source; the first three are also the dtypes that quantized sources are rounded to on their way.
enum Element : int32_t { kF32, kF16, kBf16, kE4m3, kE4m3Fnuz, kE2m1 };
enum ScaleType : int32_t { kScaleF32, kScaleE8m0, kScaleE4m3 };

// A stack of matrices; strides in stored elements (bytes for packed codes).
struct View {
  void* data;
  int64_t stride_e, stride_n, stride_k;
};

// One weight of a work list, [e, n, k] in elements.
struct Item {
  int64_t e, n, k;
  View source;
  View source_scale;  // one scale a block of block_rows x block_cols; no data: a plain source
  View source_second;  // NVFP4 sources: fp32, one a matrix
  int64_t block_rows, block_cols, offset_rows, offset_cols;
  View amax;  // greatest magnitudes to use; no data: the weight's own
  View data, scale, second;
  int64_t scale_n, scale_k;  // rows and columns of `scale`
  int64_t* bad;  // [2]: bad units, first bad row
  double* sums;  // [slots, 2]: squares of the values and of the errors, a row, tile or run of rows each
  // GPU only:
  int64_t first_tile;  // tiles of the items before this one
  uint32_t row_magic;  // ceil(2^32 / packs in a row), or 0: divide
  int32_t row_shift, col_shift;  // of block_rows and block_cols, if `aligned`
  int32_t lanes_shift;  // of the lanes that share a row
  bool aligned;  // whole packs can be loaded and stored at once, and lie under one scale that shifts find
};

// What is the same for all weights of a work list.
struct Job {
  Element element;
  ScaleType scale_type;
  bool encoded;  // the source has scales
  Element through;  // dtype of the values on their way: the source's own if it is plain
  Target target;
  Rounding rounding;
  Layout layout;
  bool fnuz;
  int64_t amax_rows, amax_cols;  // block of kAmax
};

constexpr int kMaxItems = 10;

// A work list as a kernel argument.
struct WorkList {
  Job job;
  int32_t count;
  Item items[kMaxItems];
};

}  // namespace qk
