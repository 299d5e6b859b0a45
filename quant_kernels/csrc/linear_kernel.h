// The kernel of the linear product for tensor cores.
//
// A block works on 32, 64, 128 or 256 rows of the weight; its warps share the input side, as the blocks of a cluster do. It
// first makes its part of x ready: quantized if asked for, as f16 with one factor a row. Codes become f16 exactly; products
// are exact, sums fp32. MX scales multiply the sum of their group. Sums of warps and blocks are added in a fixed order.
#pragma once

#include "linear.h"
#include "linear_nvidia.h"
#include "linear_x.h"

#if defined(QK_CUDA)

namespace qk {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStages = 3;
constexpr int kTiles = 2, kWarpRows = 16 * kTiles;  // row tiles and rows of the weight that a warp works on
constexpr int kChunkBytes = 128, kStageBytes = kWarpRows * kChunkBytes;
constexpr int kRingBytes = kWarps * kStages * kStageBytes;
constexpr int kMostShared = 227 * 1024, kSharedOfAll = 228 * 1024;  // of a block, of a multiprocessor

template <WeightFormat format>
constexpr int kElements = format == kGroupFp4 ? 2 * kChunkBytes : kChunkBytes;  // of a chunk

// Sizes of the parts of shared memory, in bytes; `slice`: chunks of the block.
struct Shape {
  int ring_bytes, x_stride, x_bytes, scale_stride, scale_bytes, byte_stride, total;
};

template <WeightFormat format, int tiles>
QK_FN Shape shape_of(int tokens, int row_groups, int slice) {
  Shape shape{};
  // Codes, and in their place sums at the end.
  const int sums = 4 * 8 * tiles * kWarpRows * (kWarps + row_groups);
  shape.ring_bytes = sums > kRingBytes ? sums : kRingBytes;
  shape.x_stride = 2 * slice * kElements<format> + 64;  // 64 bytes apart modulo 128: two rows fill the banks
  shape.x_bytes = tokens * shape.x_stride;
  if (format != kRowFp8) {
    shape.scale_stride = 2 * slice * kElements<format> / 32 + 4;  // an odd number of words
    shape.scale_bytes = (kWarpRows * row_groups * shape.scale_stride + 15) / 16 * 16;
    shape.byte_stride = slice * kElements<format> / 32;
  }
  shape.total = shape.ring_bytes + shape.x_bytes + shape.scale_bytes + 2 * 4 * 8 * tiles + kWarpRows * row_groups * shape.byte_stride;
  return shape;
}

struct Range {
  int begin, end;
};

// Part `index` of 2^shift nearly equal ones.
QK_DEVICE Range part_of(Range whole, int index, int shift) {
  const int size = whole.end - whole.begin;
  return Range{whole.begin + ((size * index) >> shift), whole.begin + ((size * (index + 1)) >> shift)};
}

// Ask for the E8M0 scales of the block's rows and chunks: bytes, `stride` apart. Zeros beyond the edges.
template <WeightFormat format>
QK_DEVICE void ask_for_scales(const LinearJob& job, int64_t first_row, int rows, Range slice, uint8_t* shared, int stride) {
  constexpr int kWords = kElements<format> / 128;  // of four groups, in a chunk
  const int words = (slice.end - slice.begin) * kWords, groups = static_cast<int>(job.k / 32);
  const bool whole = job.scale_stride % 4 == 0 && groups % 4 == 0 && reinterpret_cast<intptr_t>(job.scale) % 4 == 0;
#pragma unroll 1
  for (int i = thread_index(); i < rows * words; i += kThreads) {
    const int row = i / words, word = i - row * words, column = 4 * (slice.begin * kWords + word);
    const int64_t n = first_row + row < job.n ? first_row + row : job.n - 1;
    const uint8_t* source = static_cast<const uint8_t*>(job.scale) + n * job.scale_stride + column;
    uint8_t* target = shared + row * stride + 4 * word;
    if (whole) {
      copy_4(shared_address(target), source, column < groups);
    } else {
      for (int j = 0; j < 4; ++j) target[j] = column + j < groups ? source[j] : 0;
    }
  }
}

// Bytes of scales, which have arrived, to bf16.
QK_DEVICE void convert_scales(const uint8_t* bytes, int byte_stride, uint8_t* shared, int stride, int rows, int words) {
#pragma unroll 1
  for (int i = thread_index(); i < rows * words; i += kThreads) {
    const int row = i / words, word = i - row * words;
    const uint32_t four = *reinterpret_cast<const uint32_t*>(bytes + row * byte_stride + 4 * word);
    uint32_t* target = reinterpret_cast<uint32_t*>(shared + row * stride + 8 * word);
    for (int j = 0; j < 2; ++j) {
      const uint32_t low = bits_of(decode_e8m0((four >> (16 * j)) & 0xffu)), high = bits_of(decode_e8m0((four >> (16 * j + 8)) & 0xffu));
      target[j] = (low >> 16) | (high & 0xffff0000u);
    }
  }
}

// Four words of a row of x, which one lane needs for 32 elements.
QK_DEVICE void load_x(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

// One group of 32 elements: `a` holds two steps of 16 for the matrix unit. MX: the group's sum is multiplied by its scale.
template <WeightFormat format>
QK_DEVICE void multiply_group(float (&sums)[4], const uint32_t (&a)[8], const uint32_t (&b)[4], float upper, float lower) {
  if constexpr (format == kRowFp8) {
    multiply(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply(sums, a[4], a[5], a[6], a[7], b[2], b[3]);
  } else {
    float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply(found, a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply(found, a[4], a[5], a[6], a[7], b[2], b[3]);
    sums[0] = fused_multiply_add(found[0], upper, sums[0]);
    sums[1] = fused_multiply_add(found[1], upper, sums[1]);
    sums[2] = fused_multiply_add(found[2], lower, sums[2]);
    sums[3] = fused_multiply_add(found[3], lower, sums[3]);
  }
}

// One chunk of a warp's rows of the weight, times the rows of x.
template <WeightFormat format, int tiles>
QK_DEVICE void multiply_chunk(float (&sums)[kTiles][tiles][4], uint32_t stage, const uint32_t (&x)[tiles], const uint8_t* scales, int scale_stride) {
  const int lane = thread_index() % 32, row = lane % 16, column = lane / 16;
  const uint32_t rows = stage + row * kChunkBytes;
  scales += lane / 4 * scale_stride;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // two columns of 16 bytes
    uint32_t codes[kTiles][4];
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      load_matrices(codes[r], rows + 16 * r * kChunkBytes + (((2 * pair + column) ^ (row & 7)) << 4));
    }
    constexpr int groups = format == kGroupFp4 ? 2 : 1;
    uint32_t above[kTiles] = {}, below[kTiles] = {};  // scales of the groups, as bf16
    if constexpr (format != kRowFp8) {
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const uint8_t* upper = scales + 16 * r * scale_stride + 2 * groups * pair;
        if constexpr (groups == 2) {
          above[r] = *reinterpret_cast<const uint32_t*>(upper);
          below[r] = *reinterpret_cast<const uint32_t*>(upper + 8 * scale_stride);
        } else {
          above[r] = *reinterpret_cast<const uint16_t*>(upper);
          below[r] = *reinterpret_cast<const uint16_t*>(upper + 8 * scale_stride);
        }
      }
    }
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      uint32_t a[kTiles][8];
      float upper[kTiles], lower[kTiles];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        if constexpr (format == kGroupFp4) {
          uint32_t high[4], low[4];
          f16_of_e2m1(high, codes[r][2 * group]);
          f16_of_e2m1(low, codes[r][2 * group + 1]);
          for (int step = 0; step < 2; ++step) {
            a[r][4 * step] = high[2 * step];
            a[r][4 * step + 1] = low[2 * step];
            a[r][4 * step + 2] = high[2 * step + 1];
            a[r][4 * step + 3] = low[2 * step + 1];
          }
        } else {
          for (int step = 0; step < 2; ++step) {
            a[r][4 * step] = f16_of_e4m3<0>(codes[r][2 * step]);
            a[r][4 * step + 1] = f16_of_e4m3<0>(codes[r][2 * step + 1]);
            a[r][4 * step + 2] = f16_of_e4m3<1>(codes[r][2 * step]);
            a[r][4 * step + 3] = f16_of_e4m3<1>(codes[r][2 * step + 1]);
          }
        }
        upper[r] = float_of(group ? above[r] & 0xffff0000u : above[r] << 16);
        lower[r] = float_of(group ? below[r] & 0xffff0000u : below[r] << 16);
      }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        uint32_t b[4];
        load_x(b, x[tile] + 64 * (groups * pair + group));
#pragma unroll
        for (int r = 0; r < kTiles; ++r) multiply_group<format>(sums[r][tile], a[r], b, upper[r], lower[r]);
      }
    }
  }
}

// Which warps work on which rows of x: one or more warps a row, 256 columns each at a time.
struct XShare {
  int first_row, rows, begin, step;

  QK_DEVICE_MEMBER explicit XShare(int tokens) {
    const int warp = thread_index() / 32, shift = tokens == 1 ? 3 : (tokens == 2 ? 2 : (tokens <= 4 ? 1 : 0));
    first_row = warp >> shift;
    rows = kWarps >> shift;
    begin = 256 * (warp & ((1 << shift) - 1)) + 8 * (thread_index() % 32);
    step = 256 << shift;
  }
};

// Ask for columns of x, up to `valid`.
QK_DEVICE void ask_for_x(const uint16_t* x, int64_t x_stride, int tokens, int valid, uint32_t shared, int stride) {
  const XShare share(tokens);
  for (int row = share.first_row; row < tokens; row += share.rows) {
    const uint16_t* from = x + row * x_stride;
    for (int column = share.begin; column < valid; column += share.step) copy_16(shared + row * stride + 2 * column, from + column, true);
  }
}

// Make the block's part of x ready where it lies. Elements from `valid` on become zeros.
template <WeightFormat format, bool quantized>
QK_DEVICE void make_x_ready(const LinearJob& job, int valid, int columns, uint8_t* shared, int stride, uint32_t* amax, float* factors) {
  const int lane = thread_index() % 32;
  const XShare share(job.m);
  // A token's scale is that of its whole row, of which every block of the cluster sees a part.
  const bool together = quantized && job.activation == kPerTokenFp8 && job.splits > 1;
  if (together) cluster_wait();  // until every block has cleared its maxima
  for (int row = share.first_row; row < job.m; row += share.rows) {
    uint32_t found = 0;
#pragma unroll 1
    for (int column = share.begin; column < valid; column += share.step) {
      found = max_halves(found, greatest_of(*reinterpret_cast<const Words4*>(shared + row * stride + 2 * column)));
    }
    found = greatest_of_lanes(found);
    if (!together) {
      if (lane == 0) atomicMax(amax + row, found);
    } else if (lane < job.splits) {
      raise_in(lane, shared_address(amax + row), found);
    }
  }
  if (together) {
    cluster_barrier();
  } else {
    barrier();
  }
  for (int row = share.first_row; row < job.m; row += share.rows) {
    const RowOfX<quantized> rounder(job, amax[row]);
    uint8_t* x = shared + row * stride;
#pragma unroll 1
    for (int at = share.begin - 8 * lane; at < columns; at += share.step) {
      const int column = at + 8 * lane;
      Words4 words{};
      if (column < valid) words = *reinterpret_cast<const Words4*>(x + 2 * column);
      words = rounder.ready(words);
      if (column >= valid) words = Words4{};  // not the NaN of 0 / 0
      __syncwarp();
      if (column < columns) store_ready(reinterpret_cast<uint16_t*>(x), column, format, words);
    }
    if (lane == 0) factors[row] = rounder.factor;
  }
}

template <WeightFormat format, int tiles, bool quantized>
QK_GLOBAL void __launch_bounds__(kThreads, 2) linear_kernel(QK_ARGUMENT LinearJob job) {
  extern __shared__ uint4 shared_words[];
  uint8_t* shared = reinterpret_cast<uint8_t*>(shared_words);
  constexpr int kColumns = 8 * tiles;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int block = static_cast<int>(block_index());
  const int split_shift = 31 - __clz(job.splits), row_shift = 31 - __clz(job.row_groups), share_shift = 3 - row_shift;
  const int splits = job.splits, rank = block & (splits - 1);
  const int row_groups = job.row_groups, shares = kWarps >> row_shift;
  const int row_group = warp & (row_groups - 1), share = warp >> row_shift;
  const int64_t first_row = static_cast<int64_t>(block >> split_shift) * kWarpRows << row_shift;
  const Range slice = part_of(Range{0, job.chunks}, rank, split_shift);
  const Range mine = part_of(slice, share, share_shift);
  const Shape shape = shape_of<format, tiles>(job.m, row_groups, (job.chunks + splits - 1) >> split_shift);
  uint8_t* scales = shared + shape.ring_bytes + shape.x_bytes;
  uint32_t* amax = reinterpret_cast<uint32_t*>(scales + shape.scale_bytes);
  float* factors = reinterpret_cast<float*>(amax + kColumns);
  const uint32_t x = shared_address(shared + shape.ring_bytes);
  const int row_bytes = static_cast<int>(format == kGroupFp4 ? job.k / 2 : job.k);

  // Where this lane copies from: 16 bytes of rows lane / 8, + 4, + 8, ...
  constexpr int kCopies = kWarpRows / 4;
  const uint8_t* source = job.w + mine.begin * int64_t{kChunkBytes} + 16 * (lane % 8);
  int64_t offset[kCopies];
  for (int i = 0; i < kCopies; ++i) {
    const int64_t row = first_row + kWarpRows * row_group + 4 * i + lane / 8;
    offset[i] = (row < job.n ? row : job.n - 1) * job.w_stride;
  }
  const uint32_t ring = shared_address(shared) + warp * kStages * kStageBytes;
  // Rows 4 i + lane / 8 in their places: modulo 8 these are two rows, whose columns are exchanged in two ways.
  const uint32_t even = lane / 8 * kChunkBytes + (((lane % 8) ^ (lane / 8)) << 4), odd = even ^ 64;
  const int count = mine.end - mine.begin;
  const auto copy_chunk = [&](int i, int slot) {
    if (i < count) {
      const bool inside = (mine.begin + i) * kChunkBytes + 16 * (lane % 8) < row_bytes;
      const uint32_t stage = ring + slot * kStageBytes;
      for (int j = 0; j < kCopies; ++j) copy_16(stage + 4 * j * kChunkBytes + (j % 2 ? odd : even), source + offset[j], inside);
      source += kChunkBytes;
    }
    copies_end();
  };
  let_next_begin();
  wait_for_previous();
  // What the end needs: the row of the weight that this thread writes results of. All of this is asked for before the
  // weight: behind that, any load takes long.
  const int rows = kWarpRows * row_groups >> split_shift, row = rank * rows + (thread_index() & (rows - 1));
  const int64_t n = first_row + row;
  float row_scale = 1.0f;
  if constexpr (format == kRowFp8) {
    if (n < job.n) row_scale = static_cast<const float*>(job.scale)[n * job.scale_stride];
  }
  uint8_t* scale_bytes = reinterpret_cast<uint8_t*>(factors + kColumns);
  const int slice_chunks = slice.end - slice.begin, scale_words = slice_chunks * kElements<format> / 128;
  if constexpr (format != kRowFp8) {
    ask_for_scales<format>(job, first_row, kWarpRows * row_groups, slice, scale_bytes, shape.byte_stride);
  }
  const int columns = slice_chunks * kElements<format>;
  const int64_t left = job.k - int64_t{slice.begin} * kElements<format>;
  const int valid = left < columns ? static_cast<int>(left) : columns;
  ask_for_x(static_cast<const uint16_t*>(job.x) + int64_t{slice.begin} * kElements<format>, job.x_stride, job.m, valid, x, shape.x_stride);
  if (thread_index() < job.m) amax[thread_index()] = 0;
  if (quantized && job.activation == kPerTokenFp8 && splits > 1) cluster_arrive();
  copies_end();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copy_chunk(i, i);
  wait_for_copies<kStages - 1>();
  barrier();
  if constexpr (format != kRowFp8) {
    convert_scales(scale_bytes, shape.byte_stride, scales, shape.scale_stride, kWarpRows * row_groups, scale_words);
  }
  make_x_ready<format, quantized>(job, valid, columns, shared + shape.ring_bytes, shape.x_stride, amax, factors);
  barrier();

  // Rows of x that this lane reads; what is multiplied with the last one again is not used.
  uint32_t x_rows[tiles];
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = 8 * tile + lane / 4;
    x_rows[tile] = x + (row < job.m ? row : job.m - 1) * shape.x_stride + 16 * (lane % 4);
  }
  float sums[kTiles][tiles][4] = {};
  int slot = 0;
  const uint8_t* scale = scales + kWarpRows * row_group * shape.scale_stride + (mine.begin - slice.begin) * kElements<format> / 16;
  for (int tile = 0; tile < tiles; ++tile) x_rows[tile] += (mine.begin - slice.begin) * 2 * kElements<format>;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    copy_chunk(i + kStages - 1, slot == 0 ? kStages - 1 : slot - 1);
    multiply_chunk<format, tiles>(sums, ring + slot * kStageBytes, x_rows, scale, shape.scale_stride);
    slot = slot == kStages - 1 ? 0 : slot + 1;
    scale += kElements<format> / 16;
    for (int tile = 0; tile < tiles; ++tile) x_rows[tile] += 2 * kElements<format>;
  }
  wait_for_copies<0>();
  barrier();

  // Sums of the warps, then of the blocks: [warp][its rows][columns], [rows][columns].
  float* of_warps = reinterpret_cast<float*>(shared);
  float* of_block = of_warps + kWarps * kWarpRows * kColumns;
  for (int r = 0; r < kTiles; ++r) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int place = (warp * kWarpRows + 16 * r + lane / 4) * kColumns + 8 * tile + 2 * (lane % 4);
      *reinterpret_cast<float2*>(of_warps + place) = make_float2(sums[r][tile][0], sums[r][tile][1]);
      *reinterpret_cast<float2*>(of_warps + place + 8 * kColumns) = make_float2(sums[r][tile][2], sums[r][tile][3]);
    }
  }
  barrier();
  constexpr float kUnit = format == kGroupFp4 ? 16384.0f : 1.0f;
  const int numbers = kWarpRows * row_groups * kColumns;
#pragma unroll 1
  for (int i = thread_index(); i < numbers; i += kThreads) {
    float sum = 0.0f;
    for (int part = 0; part < shares; ++part) sum += of_warps[part * numbers + i];
    of_block[i] = i % kColumns < job.m ? sum * kUnit * factors[i % kColumns] : 0.0f;
  }
  if (splits > 1) {
    cluster_barrier();
  } else {
    barrier();
  }
  for (int column = thread_index() / rows; column < job.m; column += kThreads / rows) {
    float sum = 0.0f;
    if (splits > 1) {
      const uint32_t place = shared_address(of_block + row * kColumns + column);
      for (int other = 0; other < splits; ++other) sum += load_from(other, place);
    } else {
      sum = of_block[row * kColumns + column];
    }
    if (n >= job.n) continue;
    sum *= row_scale;
    if (job.bias != nullptr) sum += x_value(job.element, static_cast<const uint16_t*>(job.bias)[n], 0);
    store_result(job, column * job.n + n, sum);
  }
  if (splits > 1) cluster_barrier();
}

}  // namespace
}  // namespace qk

#endif
