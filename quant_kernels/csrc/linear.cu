// The linear product for up to 64 rows of x: weights stream through shared memory once and meet x on the matrix units.
//
// A block works on 16, 32, 64 or 128 rows of the weight; its warps share the input side, as the blocks of a cluster do.
// Codes become f16 exactly; products are exact, sums fp32. MX scales multiply the sum of their group. Sums of warps and
// blocks are added in a fixed order.

#include "linear.h"

#include <atomic>

#include "launch.h"
#include "linear_plain.h"
#include "linear_x.h"

namespace qk {

#if defined(QK_CUDA)

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStages = 4;
constexpr int kChunkBytes = 128, kStageBytes = 16 * kChunkBytes;
constexpr int kRingBytes = kWarps * kStages * kStageBytes;
constexpr int kMostShared = 227 * 1024;

template <WeightFormat format>
constexpr int kElements = format == kGroupFp4 ? 2 * kChunkBytes : kChunkBytes;  // of a chunk

// Sizes of the parts of shared memory, in bytes.
struct Shape {
  int x_stride, x_bytes, scale_stride, scale_bytes, total;
};

// `columns`: chunks of x that are kept at once; `slice`: chunks of the block.
template <WeightFormat format, int tiles>
QK_FN Shape shape_of(int tokens, int row_groups, int columns, int slice) {
  Shape shape{};
  shape.x_stride = 2 * columns * kElements<format> + 64;  // 64 bytes apart modulo 128: two rows fill the banks
  shape.x_bytes = tokens * shape.x_stride;
  if (format != kRowFp8) {
    shape.scale_stride = 2 * slice * kElements<format> / 32 + 4;  // an odd number of words
    shape.scale_bytes = (16 * row_groups * shape.scale_stride + 15) / 16 * 16;
  }
  shape.total = kRingBytes + shape.x_bytes + shape.scale_bytes + 2 * 4 * 8 * tiles;
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

// E8M0 scales of the block's rows and chunks on their way to shared memory, as bf16. Eight words of them a thread are asked
// for before the weight is: behind that, any load takes long.
template <WeightFormat format>
struct ScaleCopy {
  static constexpr int kHeld = 8, kGroups = kElements<format> / 32;
  const LinearJob& job;
  int64_t first_row;
  int count, words;
  int64_t first_group;
  bool whole;
  uint32_t held[kHeld];

  QK_DEVICE_MEMBER ScaleCopy(const LinearJob& of, int64_t row, int rows, Range slice) : job(of), first_row(row) {
    words = (slice.end - slice.begin) * kGroups / 4;
    count = rows * words;
    first_group = static_cast<int64_t>(slice.begin) * kGroups;
    whole = job.scale_stride % 4 == 0 && reinterpret_cast<intptr_t>(job.scale) % 4 == 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = load(thread_index() + i * kThreads);
  }

  // Four bytes, zeros (2^-127) beyond the edges.
  QK_DEVICE_MEMBER uint32_t load(int i) const {
    if (i >= count) return 0;
    const int row = i / words;
    const int64_t column = first_group + 4 * (i - row * words), groups = job.k / 32;
    const int64_t n = first_row + row < job.n ? first_row + row : job.n - 1;
    const uint8_t* source = static_cast<const uint8_t*>(job.scale) + n * job.scale_stride + column;
    if (whole && column + 4 <= groups) return *reinterpret_cast<const uint32_t*>(source);
    uint32_t bytes = 0;
    for (int j = 0; j < 4; ++j) bytes |= column + j < groups ? static_cast<uint32_t>(source[j]) << (8 * j) : 0u;
    return bytes;
  }

  QK_DEVICE_MEMBER void store(uint8_t* shared, int stride, int i, uint32_t bytes) const {
    if (i >= count) return;
    uint32_t* target = reinterpret_cast<uint32_t*>(shared + i / words * stride + 8 * (i % words));
    for (int j = 0; j < 2; ++j) {
      const uint32_t low = bits_of(decode_e8m0((bytes >> (16 * j)) & 0xffu)), high = bits_of(decode_e8m0((bytes >> (16 * j + 8)) & 0xffu));
      target[j] = (low >> 16) | (high & 0xffff0000u);
    }
  }

  QK_DEVICE_MEMBER void finish(uint8_t* shared, int stride) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) store(shared, stride, thread_index() + i * kThreads, held[i]);
    for (int i = thread_index() + kHeld * kThreads; i < count; i += kThreads) store(shared, stride, i, load(i));
  }
};

template <>
struct ScaleCopy<kRowFp8> {
  QK_DEVICE_MEMBER ScaleCopy(const LinearJob&, int64_t, int, Range) {}
  QK_DEVICE_MEMBER void finish(uint8_t*, int) const {}
};

// One chunk of 16 rows of the weight, times the rows of x.
template <WeightFormat format, int tiles>
QK_DEVICE void multiply_chunk(float (&sums)[tiles][4], uint32_t stage, const uint32_t (&x)[tiles], const uint8_t* scales, int scale_stride) {
  const int lane = thread_index() % 32, g = lane / 4;
  const int row = (lane & 7) | (lane & 8), column = lane / 16;
  const uint32_t rows = stage + row * kChunkBytes;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // two columns of 16 bytes
    uint32_t codes[4];
    load_matrices(codes, rows + (((2 * pair + column) ^ (row & 7)) << 4));
    if constexpr (format == kGroupFp4) {
      const uint32_t above = *reinterpret_cast<const uint32_t*>(scales + g * scale_stride + 4 * pair);
      const uint32_t below = *reinterpret_cast<const uint32_t*>(scales + (g + 8) * scale_stride + 4 * pair);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        uint32_t upper[4], lower[4];
        f16_of_e2m1(upper, codes[2 * group]);
        f16_of_e2m1(lower, codes[2 * group + 1]);
        const float high = float_of(group ? above & 0xffff0000u : above << 16);
        const float low = float_of(group ? below & 0xffff0000u : below << 16);
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          uint32_t b[4];
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                       : "r"(x[tile] + 64 * (2 * pair + group)));
          float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          multiply(found, upper[0], lower[0], upper[1], lower[1], b[0], b[1]);
          multiply(found, upper[2], lower[2], upper[3], lower[3], b[2], b[3]);
          sums[tile][0] = fused_multiply_add(found[0], high, sums[tile][0]);
          sums[tile][1] = fused_multiply_add(found[1], high, sums[tile][1]);
          sums[tile][2] = fused_multiply_add(found[2], low, sums[tile][2]);
          sums[tile][3] = fused_multiply_add(found[3], low, sums[tile][3]);
        }
      }
    } else {
      uint32_t a[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[2 * i] = f16_of_e4m3<0>(codes[i]);
        a[2 * i + 1] = f16_of_e4m3<1>(codes[i]);
      }
      float high = 1.0f, low = 1.0f;
      if constexpr (format == kGroupFp8) {
        high = float_of(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(scales + g * scale_stride + 2 * pair)) << 16);
        low = float_of(static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(scales + (g + 8) * scale_stride + 2 * pair)) << 16);
      }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        uint32_t b[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(x[tile] + 64 * pair));
        if constexpr (format == kRowFp8) {
          multiply(sums[tile], a[0], a[2], a[1], a[3], b[0], b[1]);
          multiply(sums[tile], a[4], a[6], a[5], a[7], b[2], b[3]);
        } else {
          float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          multiply(found, a[0], a[2], a[1], a[3], b[0], b[1]);
          multiply(found, a[4], a[6], a[5], a[7], b[2], b[3]);
          sums[tile][0] = fused_multiply_add(found[0], high, sums[tile][0]);
          sums[tile][1] = fused_multiply_add(found[1], high, sums[tile][1]);
          sums[tile][2] = fused_multiply_add(found[2], low, sums[tile][2]);
          sums[tile][3] = fused_multiply_add(found[3], low, sums[tile][3]);
        }
      }
    }
  }
}

constexpr int kHeldX = 8;

// The block's part of x on its way to shared memory: columns `slice` of all rows, of which a warp holds 256 columns of a row
// at a time in registers, asked for before the weight is.
template <WeightFormat format>
struct XCopy {
  const LinearJob& job;
  int columns, steps;
  int64_t first;
  Words4 held[kHeldX];

  QK_DEVICE_MEMBER XCopy(const LinearJob& of, Range slice) : job(of) {
    columns = (slice.end - slice.begin) * kElements<format>;
    first = static_cast<int64_t>(slice.begin) * kElements<format>;
    steps = (columns + 255) / 256;
    each([&](int i, int row, int column) {
      held[i] = Words4{};
      if (column < columns && first + column < job.k) {
        held[i] = *reinterpret_cast<const Words4*>(static_cast<const uint16_t*>(job.x) + row * job.x_stride + first + column);
      }
    });
  }

  // Go on to the next part of this warp; false after the last.
  QK_DEVICE_MEMBER bool next(int& row, int& step) const {
    while (step >= steps && row < job.m) {
      step -= steps;
      ++row;
    }
    return row < job.m;
  }

  // Call for each part that this warp holds: its number, the row of x and this lane's column.
  template <class Function>
  QK_DEVICE_MEMBER void each(Function function) const {
    int row = 0, step = thread_index() / 32;
#pragma unroll
    for (int i = 0; i < kHeldX; ++i) {
      if (!next(row, step)) break;
      function(i, row, 256 * step + 8 * (thread_index() % 32));
      step += kWarps;
    }
  }

  // Quantize and store; the greatest magnitudes of the rows lie in `amax` at the end.
  QK_DEVICE_MEMBER void finish(uint8_t* shared, int stride, uint32_t* amax, float* factors) const {
    const int lane = thread_index() % 32;
    // A token's scale is that of its whole row, of which every block of the cluster sees a part.
    const bool together = job.activation == kPerTokenFp8 && job.splits > 1;
    if (thread_index() < job.m) amax[thread_index()] = 0;
    barrier();
    if (together) {
      cluster_arrive();
      cluster_wait();
    }
    each([&](int i, int row, int column) {
      if (column < columns) *reinterpret_cast<Words4*>(shared + row * stride + 2 * column) = held[i];
      const uint32_t found = greatest_of_lanes(greatest_of(held[i]));
      if (together) {
        if (lane < job.splits) raise_in(lane, shared_address(amax + row), found);
      } else if (lane == 0) {
        atomicMax(amax + row, found);
      }
    });
    if (together) {
      cluster_barrier();
    } else {
      barrier();
    }
    // In a loop, not unrolled: all this code once.
    int row = 0;
#pragma unroll 1
    for (int step = thread_index() / 32; next(row, step); step += kWarps) {
      const RowOfX rounder(job, amax[row]);
      const int column = 256 * step + 8 * lane;
      uint8_t* to = shared + row * stride;
      Words4 words{};
      if (column < columns) words = *reinterpret_cast<const Words4*>(to + 2 * column);
      words = rounder.ready(words);
      if (first + column >= job.k) words = Words4{};  // not the NaN of 0 / 0
      __syncwarp();
      if (column < columns) store_ready(reinterpret_cast<uint16_t*>(to), column, format, words);
      if (lane == 0) factors[row] = rounder.factor;
    }
  }
};

// Whether every warp can hold its part of x.
template <WeightFormat format>
bool x_is_held(const LinearJob& job, int slice) {
  return job.m * ((slice * kElements<format> + 255) / 256) <= kWarps * kHeldX;
}

template <WeightFormat format, int tiles>
QK_GLOBAL void __launch_bounds__(kThreads, tiles == 1 ? 3 : 2) linear_kernel(QK_ARGUMENT LinearJob job) {
  extern __shared__ uint4 shared_words[];
  uint8_t* shared = reinterpret_cast<uint8_t*>(shared_words);
  constexpr int kColumns = 8 * tiles;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int block = static_cast<int>(block_index());
  const int split_shift = 31 - __clz(job.splits), row_shift = 31 - __clz(job.row_groups), share_shift = 3 - row_shift;
  const int splits = job.splits, rank = block & (splits - 1);
  const int row_groups = job.row_groups, shares = kWarps >> row_shift;
  const int row_group = warp & (row_groups - 1), share = warp >> row_shift;
  const int64_t first_row = static_cast<int64_t>(block >> split_shift) << (4 + row_shift);
  const Range slice = part_of(Range{0, job.chunks}, rank, split_shift);
  const Range mine = part_of(slice, share, share_shift);
  const bool one_launch = job.way == kOneLaunch || job.way == kOneLaunchEarly;
  const int most_chunks = (job.chunks + splits - 1) >> split_shift;
  const Shape shape = shape_of<format, tiles>(job.m, row_groups, one_launch ? most_chunks : shares * job.panel_chunks, most_chunks);
  uint8_t* scales = shared + kRingBytes + shape.x_bytes;
  uint32_t* amax = reinterpret_cast<uint32_t*>(scales + shape.scale_bytes);
  float* factors = reinterpret_cast<float*>(amax + kColumns);
  const uint32_t x = shared_address(shared + kRingBytes);
  const int row_bytes = static_cast<int>(format == kGroupFp4 ? job.k / 2 : job.k);

  // Where this lane copies from: 16 bytes of rows lane / 8, + 4, + 8, + 12.
  const uint8_t* source[4];
  uint32_t target[4];
  for (int i = 0; i < 4; ++i) {
    const int place = 4 * i + lane / 8;
    const int64_t row = first_row + 16 * row_group + place;
    source[i] = job.w + (row < job.n ? row : job.n - 1) * job.w_stride + mine.begin * int64_t{kChunkBytes} + 16 * (lane % 8);
    target[i] = place * kChunkBytes + (((lane % 8) ^ (place & 7)) << 4);
  }
  const uint32_t ring = shared_address(shared) + warp * kStages * kStageBytes;
  const int count = mine.end - mine.begin;
  const auto copy_chunk = [&](int i) {
    if (i < count) {
      const bool inside = (mine.begin + i) * kChunkBytes + 16 * (lane % 8) < row_bytes;
      const uint32_t stage = ring + (i % kStages) * kStageBytes;
      for (int j = 0; j < 4; ++j) copy_16(stage + target[j], source[j] + i * kChunkBytes, inside);
    }
    copies_end();
  };
  if (one_launch) {
    let_next_begin();
    wait_for_previous();
  }
  // What the end needs: the row of the weight that this thread writes results of.
  const int rows = 16 * row_groups >> split_shift, row = rank * rows + (thread_index() & (rows - 1));
  const int64_t n = first_row + row;
  float row_scale = 1.0f, row_bias = 0.0f;
  if (n < job.n) {
    if constexpr (format == kRowFp8) row_scale = static_cast<const float*>(job.scale)[n * job.scale_stride];
    if (job.bias != nullptr) row_bias = x_value(job.element, static_cast<const uint16_t*>(job.bias)[n], 0);
  }
  const ScaleCopy<format> scale_copy(job, first_row, 16 * row_groups, slice);
  // The weight was there before the first of two launches began: only x has to be waited for.
  if constexpr (tiles <= 2) {
    if (one_launch) {
      const XCopy<format> x_copy(job, slice);
      for (int i = 0; i < kStages - 1; ++i) copy_chunk(i);
      scale_copy.finish(scales, shape.scale_stride);
      x_copy.finish(shared + kRingBytes, shape.x_stride, amax, factors);
      barrier();
    }
  }
  if (!one_launch) {
    for (int i = 0; i < kStages - 1; ++i) copy_chunk(i);
    scale_copy.finish(scales, shape.scale_stride);
    wait_for_previous();
    if (thread_index() < job.m) factors[thread_index()] = job.factors[thread_index()];
  }

  // Rows of x that this lane reads; what is multiplied with the last one again is not used.
  uint32_t x_rows[tiles];
  for (int tile = 0; tile < tiles; ++tile) {
    const int row = 8 * tile + lane / 4;
    x_rows[tile] = x + (row < job.m ? row : job.m - 1) * shape.x_stride + 16 * (lane % 4);
  }
  float sums[tiles][4] = {};
  const int most = (slice.end - slice.begin + shares - 1) >> share_shift;
  for (int panel = 0; panel < most; panel += job.panel_chunks) {
    if (panel > 0) barrier();
    // Chunks of x, one a warp at a time: all rows, for the warps that share the input side.
    for (int i = warp; !one_launch && i < shares * job.panel_chunks; i += kWarps) {
      const int part = i / job.panel_chunks, chunk = part_of(slice, part, share_shift).begin + panel + i % job.panel_chunks;
      if (chunk >= slice.end) continue;
      constexpr int kVectors = kElements<format> / 8;
      const uint16_t* from = job.ready_x + static_cast<int64_t>(chunk) * kElements<format> + 8 * (lane % kVectors);
      const uint32_t to = x + i * 2 * kElements<format> + 16 * (lane % kVectors);
      for (int row = lane / kVectors; row < job.m; row += 32 / kVectors) {
        copy_16(to + row * shape.x_stride, from + row * job.ready_stride, true);
      }
    }
    if (!one_launch) {
      copies_end();
      wait_for_copies<0>();
      barrier();
    }
    const int end = panel + job.panel_chunks < count ? panel + job.panel_chunks : count;
    for (int i = panel; i < end; ++i) {
      wait_for_copies<kStages - 2>();
      __syncwarp();
      copy_chunk(i + kStages - 1);
      const int place = one_launch ? mine.begin + i - slice.begin : share * job.panel_chunks + i - panel;
      uint32_t columns[tiles];
      for (int tile = 0; tile < tiles; ++tile) columns[tile] = x_rows[tile] + place * 2 * kElements<format>;
      const uint8_t* scale = scales + 16 * row_group * shape.scale_stride + kElements<format> / 16 * (mine.begin + i - slice.begin);
      multiply_chunk<format, tiles>(sums, ring + i % kStages * kStageBytes, columns, scale, shape.scale_stride);
    }
  }
  wait_for_copies<0>();
  barrier();

  // Sums of the warps, then of the blocks: [warp][16][columns], [rows][columns].
  float* of_warps = reinterpret_cast<float*>(shared);
  float* of_block = of_warps + kWarps * 16 * kColumns;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 8 * tile + 2 * (lane % 4) + i % 2;
      of_warps[(warp * 16 + row) * kColumns + column] = sums[tile][i];
    }
  }
  barrier();
  constexpr float kUnit = format == kGroupFp4 ? 16384.0f : 1.0f;
  for (int i = thread_index(); i < 16 * row_groups * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    float sum = 0.0f;
    for (int part = 0; part < shares; ++part) {
      sum += of_warps[((part * row_groups + row / 16) * 16 + row % 16) * kColumns + column];
    }
    of_block[i] = column < job.m ? sum * kUnit * factors[column] : 0.0f;
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
    if (n < job.n) store_result(job, column * job.n + n, sum * row_scale + row_bias);
  }
  if (splits > 1) cluster_barrier();
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
    return found > 0 ? found : 1;
  }();
  return count;
}

// Devices on which a kernel may already use all shared memory, one bit each.
template <WeightFormat format, int tiles>
std::atomic<uint64_t> allowed{0};

const char* allow_shared(const void* kernel, std::atomic<uint64_t>& devices) {
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (devices.load(std::memory_order_relaxed) & bit) return nullptr;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  devices.fetch_or(bit, std::memory_order_relaxed);
  return nullptr;
}

int64_t pieces(int64_t size, int64_t step) { return (size + step - 1) / step; }

// Chunks of x that each warp keeps at once, so that x takes at most `allowed` bytes.
template <WeightFormat format, int tiles>
int panel_for(const LinearJob& job, int allowed) {
  const int shares = kWarps / job.row_groups;
  const int64_t most = pieces(pieces(job.chunks, job.splits), shares);
  const int64_t fit = allowed / (int64_t{job.m} * shares * 2 * kElements<format>);
  return static_cast<int>(fit < 1 ? 1 : (fit < most ? fit : most));
}

// Choose what was left open: enough blocks for every multiprocessor, and work enough for every warp.
template <int tiles>
void choose(LinearJob& job) {
  const int64_t groups = pieces(job.n, 16);
  if (job.row_groups == 0) {
    job.row_groups = tiles == 8 ? 4 : (groups >= 256 ? 2 : 1);
  }
  if (job.splits == 0) {
    const int64_t blocks = pieces(groups, job.row_groups);
    const int shares = kWarps / job.row_groups;
    job.splits = 1;
    while (job.splits < 8 && blocks * job.splits < 2 * multiprocessors() && job.chunks >= 2 * job.splits * shares) job.splits *= 2;
  }
  if (job.way == kChosen) job.way = tiles <= 2 ? kOneLaunch : kTwoLaunches;
}

// Start a kernel; `early`: it waits itself for what precedes it, and may be brought to the device before that has ended.
const char* start_kernel(void (*kernel)(LinearJob), int64_t blocks, int threads, int shared, int cluster, bool early,
                         const LinearJob& job, int64_t stream) {
  if (blocks > 0x7fffffff) return "the weight has too many rows";
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, job);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <WeightFormat format, int tiles>
const char* launch_linear(LinearJob job, int64_t stream) {
  job.chunks = static_cast<int32_t>(pieces(job.k, kElements<format>));
  choose<tiles>(job);
  while (job.splits > 1 && job.splits > job.chunks) job.splits /= 2;
  const int slice = static_cast<int>(pieces(job.chunks, job.splits));
  bool one_launch = job.way == kOneLaunch || job.way == kOneLaunchEarly;
  const bool early = job.way == kOneLaunchEarly || job.way == kTwoLaunchesEarly;
  Shape shape{};
  if (one_launch) {
    job.panel_chunks = slice;  // of each warp, at most: all at once
    shape = shape_of<format, tiles>(job.m, job.row_groups, slice, slice);
    one_launch = tiles <= 2 && shape.total <= kMostShared && x_is_held<format>(job, slice);
    if (!one_launch) job.way = early ? kTwoLaunchesEarly : kTwoLaunches;
  }
  for (; !one_launch; job.row_groups *= 2) {
    job.panel_chunks = panel_for<format, tiles>(job, tiles <= 2 ? 40 * 1024 : 80 * 1024);
    shape = shape_of<format, tiles>(job.m, job.row_groups, kWarps / job.row_groups * job.panel_chunks, slice);
    if (shape.total <= kMostShared) break;
    if (job.row_groups == kWarps) return "the input side is too long";
  }
  if (const char* error = allow_shared(reinterpret_cast<const void*>(linear_kernel<format, tiles>), allowed<format, tiles>)) return error;
  const int64_t blocks = pieces(job.n, 16 * job.row_groups) * job.splits;
  if (one_launch) return start_kernel(linear_kernel<format, tiles>, blocks, kThreads, shape.total, job.splits, early, job, stream);
  if (const char* error = start_kernel(linear_x_kernel, job.m, kReadyThreads, 0, 1, early, job, stream)) return error;
  return start_kernel(linear_kernel<format, tiles>, blocks, kThreads, shape.total, job.splits, true, job, stream);
}

template <WeightFormat format>
const char* launch_format(const LinearJob& job, int64_t stream) {
  if (job.m <= 8) return launch_linear<format, 1>(job, stream);
  if (job.m <= 16) return launch_linear<format, 2>(job, stream);
  if (job.m <= 32) return launch_linear<format, 4>(job, stream);
  return launch_linear<format, 8>(job, stream);
}

}  // namespace

bool linear_kernel_built(int64_t m) { return m <= kMostTokens; }

const char* linear_on_device(LinearJob job, void* workspace, int64_t stream) {
  job.factors = static_cast<float*>(workspace);
  job.ready_x = reinterpret_cast<uint16_t*>(job.factors + kMostTokens);
  job.ready_stride = pieces(job.k, elements_a_chunk(job.format)) * elements_a_chunk(job.format);
  switch (job.format) {
    case kRowFp8: return launch_format<kRowFp8>(job, stream);
    case kGroupFp8: return launch_format<kGroupFp8>(job, stream);
    case kGroupFp4: return launch_format<kGroupFp4>(job, stream);
    default: return "unknown format";
  }
}

#elif defined(QK_LAUNCHERS)

// Run a kernel; with the emulation, on the host.
const char* start(void (*kernel)(LinearJob), int64_t blocks, int threads, const LinearJob& job, int64_t stream);

#endif

}  // namespace qk
