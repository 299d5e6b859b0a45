// PTPC FP8 of e4m3 codes in blocks of 128 columns, by tables: under the scale of a block and the scale of an output row, the
// new code is the old one's octave plus one of 8 numbers. A row stays in registers, as codes, between its maximum and its new
// codes; 8 to 128 lanes share it.

#include "coded.h"
#include "launch.h"

namespace qk {
namespace {

constexpr int kCodedThreads = 256;
constexpr int kCodedLane = 16;
constexpr int kCodedPacks = 4;
constexpr int kPacksABlock = 128 / kCodedLane;
constexpr int kTables = kCodedThreads * kCodedPacks / kPacksABlock;

// What a block's codes become in one row.
struct alignas(16) Table {
  uint32_t low, high;  // for each of the 8 mantissas, how far its new code is above the first one's, in bytes
  uint32_t first;  // the first one's new code in octave 0, in each byte
  uint32_t least;  // the least code that the table holds for, in each byte
};

using ByValue = EncodedLoader<kE4m3, kBf16, kCodedLane, kScaleF32>;

QK_DEVICE int exponent_of(float value) { return static_cast<int>((bits_of(value) >> 23) & 0xffu); }

// 1 ... 2
QK_DEVICE float mantissa_of(float value) { return float_of((bits_of(value) & 0x007fffffu) | 0x3f800000u); }

// Half a table, mantissas 4 * half and on, by two neighbouring lanes.
QK_DEVICE void make_table(Table& table, int half, float block_scale, float row_scale) {
  // The quotient's exponent is an integer apart: its mantissa is what both mantissas give.
  const Divider divider(mantissa_of(row_scale), 0x3f800000u);
  const float mantissa = mantissa_of(block_scale), start = half == 0 ? 8.0f : 12.0f;
  uint32_t codes[4];  // in octaves of 8, like e4m3 codes
  for (int i = 0; i < 4; i += 2) {
    const uint32_t pair = pack_bf16((start + static_cast<float>(i)) * mantissa, (start + static_cast<float>(i + 1)) * mantissa);
    for (int j = 0; j < 2; ++j) {
      const uint32_t bits = bits_of(divider.divide_plain(float_of(j == 0 ? pair << 16 : pair & 0xffff0000u)));
      codes[i + j] = (bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
    }
  }
  const uint32_t other = shuffle_xor(codes[0], 1), base = half == 0 ? codes[0] : other;
  const uint32_t word = (codes[0] - base) | ((codes[1] - base) << 8) | ((codes[2] - base) << 16) | ((codes[3] - base) << 24);
  const int first = static_cast<int>(base) + 8 * (exponent_of(block_scale) - exponent_of(row_scale)) - 8 * (127 - 7 + 10);
  // A new code is at most one less than the old one plus `first`; below 8 it would be subnormal.
  const int least = usual_scale(block_scale) && usual_scale(row_scale) ? (first < 1 ? 9 - first : 8) : 128;
  if (half == 0) {
    table.low = word;
    table.first = in_each_byte(first);
  } else {
    table.high = word;
    table.least = in_each_byte(least < 128 ? least : 128);
  }
}

QK_DEVICE void coded_rows_block(const WorkList& list) {
  QK_SHARED Table tables[kTables];
  QK_SHARED uint32_t shared[kCodedThreads / 32];
  const int thread = thread_index();
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const int shift = item.lanes_shift, lanes = 1 << shift, rows = kCodedThreads >> shift, lane = thread & (lanes - 1);
  const MatrixTile at(item, tile, (item.n + rows - 1) >> (8 - shift));
  const int64_t n = at.index * rows + (thread >> shift);
  const bool live = n < item.n;
  const int64_t row = live ? n : 0;
  const int first_k = lane * kCodedLane, step = lanes * kCodedLane;
  const int reach = live ? static_cast<int>(item.k) - first_k : 0;
  const uint8_t* source = place<const uint8_t>(item.source, at.e, row, 0);
  const float* scales = place<const float>(item.source_scale, at.e, (row + item.offset_rows) >> item.row_shift,
                                           item.offset_cols >> 7);
  const int scale_stride = static_cast<int>(item.source_scale.stride_k);
  const auto block_scale = [&](int block) {
    const float scale = scales[block * scale_stride];
    return item.bad != nullptr && scale < 0.0f ? float_of(kQuietNan) : scale;
  };

  Words4 codes[kCodedPacks];
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    codes[i] = Words4{{0, 0, 0, 0}};
    if (i * step < reach) codes[i] = load_once<Words4>(source + first_k + i * step);
  }
  const bool tabled = live && (lane >> 1) * 128 < item.k;
  const float table_scale = tabled ? block_scale(lane >> 1) : 1.0f;
  float pack_scales[kCodedPacks];
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    pack_scales[i] = i * step < reach ? block_scale((first_k + i * step) >> 7) : 0.0f;
  }
  uint32_t greatest_codes = 0;
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) greatest_codes |= greatest_code(codes[i]) << (8 * i);
  float decoded[kCodedPacks];
  unpack_e4m3(greatest_codes, decoded);
  uint32_t greatest = 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    finite = finite && (bits_of(pack_scales[i]) & kMagnitude) < kInfinity;
    greatest = max_u32(greatest, (pack_bf16(decoded[i] * pack_scales[i], 0.0f) << 16) & kMagnitude);
  }
  if (!finite) {  // infinity times zero is greater than what the greatest code gives
#pragma unroll 1
    for (int k = 0; k < reach; k += step) {
      const auto values = ByValue::load(job, item, at.e, row, first_k + k);
      greatest = max_u32(greatest, ByValue::Values::amax_bits(values.partial_amax()));
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = shuffle_xor(greatest, distance);
    if (distance < lanes) greatest = max_u32(greatest, other);
  }
  if (lanes > 32) {
    if (thread % 32 == 0) shared[thread / 32] = greatest;
    barrier();
    for (int i = 0; i < lanes / 32; ++i) greatest = max_u32(greatest, shared[(thread >> shift) * (lanes / 32) + i]);
  }
  const float scale = fp32_scale(greatest, kE4m3Max);
  if (live && lane == 0) {
    check_amax(item, greatest, at.e * item.n + n);
    *place<float>(item.scale, at.e, n, 0) = scale;
  }
  make_table(tables[thread >> 1], thread & 1, table_scale, scale);
  barrier();

  uint8_t* data = place<uint8_t>(item.data, at.e, row, 0);
  const Table* own = tables + ((thread >> shift) << (shift - 1));
  uint32_t uncovered = 0;
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    const int k = first_k + i * step;
    if (i * step >= reach) continue;
    const Table table = own[k >> 7];
    Words4 found;
    uint32_t covered = kHighBits;
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = codes[i].w[j];
      const uint32_t octaves = (word & 0x78787878u) | kHighBits;
      const uint32_t moved = octaves + look_up(table.low, table.high, word & 0x07070707u) + table.first;
      covered &= (word | kHighBits) - table.least;
      found.w[j] = select_bits(kHighBits, word, moved);
    }
    if (covered == kHighBits) {
      store_once(data + k, found);
    } else {
      uncovered |= 1u << i;
    }
  }
  if (uncovered == 0) return;
  const Divider divider(scale, greatest);
#pragma unroll 1
  for (int i = 0; i < kCodedPacks; ++i) {
    if (((uncovered >> i) & 1u) == 0) continue;
    const auto values = ByValue::load(job, item, at.e, n, first_k + i * step);
    uint32_t words[kCodedLane / 4];
    encode_divided<false>(values, divider, false, words);
    store_codes(data + first_k + i * step, words, true, kCodedLane);
  }
}

QK_GLOBAL void QK_LAUNCH_BOUNDS(kCodedThreads) coded_rows_kernel(QK_ARGUMENT WorkList list) { coded_rows_block(list); }

}  // namespace

#if defined(QK_LAUNCHERS)

bool coded_rows_fit(const Job& job, const Item& item) {
  if (job.target != kPtpcFp8 || job.layout != kRowMajor || job.fnuz || !coded_source(job, item)) return false;
  if (item.sums != nullptr || item.amax.data != nullptr || item.k % kCodedLane != 0) return false;
  return item.k <= kCodedThreads / 2 * kCodedLane * kCodedPacks && item.col_shift == 7 && item.offset_cols % 128 == 0;
}

const char* launch_coded_rows(WorkList& list, int64_t stream) {
  for (int i = 0; i < list.count; ++i) {
    const int64_t k = list.items[i].k;
    list.items[i].lanes_shift = k <= 8 * kCodedLane * kCodedPacks ? 3 : (k <= 32 * kCodedLane * kCodedPacks ? 5 : 7);
  }
  const int64_t tiles = number_tiles(
      list, [](const Item& item) { return item.e * ceil_div(item.n, kCodedThreads >> item.lanes_shift); });
  return start(coded_rows_kernel, tiles, kCodedThreads, list, stream);
}

#endif

}  // namespace qk
