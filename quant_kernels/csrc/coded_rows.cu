// PTPC FP8 of e4m3 codes in blocks of 128 columns, by tables: under the scale of a block and the scale of an output row, the
// new code is the old one's octave plus one of 8 numbers. A row stays in registers, as codes, between its maximum and its new
// codes; 4 to 64 lanes share it.

#include "coded.h"
#include "launch.h"

namespace qk {
namespace {

constexpr int kCodedThreads = 256;
constexpr int kCodedLane = 16;
constexpr int kCodedPacks = 8;

// What a block's codes become in one row.
struct alignas(16) Table {
  uint32_t low, high;  // for each of the 8 mantissas, what to add to its code: 0 ... 3, in bytes
  uint32_t first;  // what to add to all codes, in each byte
  uint32_t least;  // the least code that the table holds for, in each byte
};

using ByValue = EncodedLoader<kE4m3, kBf16, kCodedLane, kScaleF32>;

QK_DEVICE int exponent_of(float value) { return static_cast<int>((bits_of(value) >> 23) & 0xffu); }

// 1 ... 2
QK_DEVICE float mantissa_of(float value) { return float_of((bits_of(value) & 0x007fffffu) | 0x3f800000u); }

QK_DEVICE Table table_of(float block_scale, float row_scale) {
  // A quotient's mantissa is that of the mantissas' quotient; its exponent is counted apart. Division as in Divider.
  const float mantissa = mantissa_of(block_scale), divisor = mantissa_of(row_scale), inverse = 1.0f / divisor;
  uint32_t codes[2];
  for (int half = 0; half < 2; ++half) {
    float ratio[4];
    for (int i = 0; i < 4; i += 2) {
      const float start = static_cast<float>(8 + 4 * half + i);
      const uint32_t pair = pack_bf16(start * mantissa, (start + 1.0f) * mantissa);
      for (int j = 0; j < 2; ++j) {
        const float value = float_of(j == 0 ? pair << 16 : pair & 0xffff0000u), quotient = value * inverse;
        ratio[i + j] = LaneSums::fused(LaneSums::fused(-quotient, divisor, value), inverse, quotient);
      }
    }
    codes[half] = pack_e4m3(ratio[0], ratio[1], ratio[2], ratio[3]);
  }
  const uint32_t base = codes[0] & 0xffu;
  const int first = static_cast<int>(base) + 8 * (exponent_of(block_scale) - exponent_of(row_scale)) - 80;
  // A new code is at least the old one plus `first` - 1; below 8 it would be subnormal.
  const int least = usual_scale(block_scale) && usual_scale(row_scale) ? (first < 1 ? 9 - first : 8) : 128;
  return {codes[0] - base * kEachByte + kEachByte - 0x03020100u, codes[1] - base * kEachByte + kEachByte - 0x07060504u,
          in_each_byte(first - 1), in_each_byte(least < 128 ? least : 128)};
}

// Rows shared by `lanes` lanes each.
template <int lanes>
QK_DEVICE void coded_rows_block(const WorkList& list, const Item& item, Table* tables, uint32_t* shared) {
  constexpr int kRows = kCodedThreads / lanes, kStep = lanes * kCodedLane, kShuffled = lanes < 32 ? lanes : 32;
  const Job& job = list.job;
  const int thread = thread_index(), lane = thread % lanes;
  const MatrixTile at(item, block_index(), (item.n + kRows - 1) / kRows);
  const int64_t first_row = at.index * kRows;
  const int left = item.n - first_row < kRows ? static_cast<int>(item.n - first_row) : kRows;
  // A lane without a row has no packs.
  const bool live = thread / lanes < left;
  const int down = live ? thread / lanes : 0;
  const int64_t row = first_row + down;
  const int first_k = lane * kCodedLane, reach = live ? static_cast<int>(item.k) - first_k : 0;
  const uint8_t* source = place<const uint8_t>(item.source, at.e, row, first_k);
  const float* scales = place<const float>(item.source_scale, at.e, (row + item.offset_rows) >> item.row_shift,
                                           item.offset_cols >> 7);
  // Of pack i, counted from the lane's first: steps are whole blocks, or half blocks that begin at one.
  const auto block = [](int i) { return i * kStep >> 7; };

  Words4 codes[kCodedPacks];
  float pack_scales[kCodedPacks];
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    codes[i] = Words4{{0, 0, 0, 0}};
    if (i * kStep < reach) codes[i] = load_once<Words4>(source + i * kStep);
  }
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    pack_scales[i] = 0.0f;
    if (i * kStep < reach) pack_scales[i] = scales[(first_k >> 7) + block(i)];
  }
  const bool tabled = live && lane * 128 < item.k;
  const float table_scale = tabled ? scales[lane] : 0.0f;
  uint32_t greatest = 0, greatest_scale = 0;
#pragma unroll
  for (int i = 0; i < kCodedPacks; i += 4) {
    uint32_t four = 0;
    for (int j = 0; j < 4; ++j) four |= greatest_code(codes[i + j]) << (8 * j);
    float decoded[4];
    unpack_e4m3(four, decoded);
    for (int j = 0; j < 4; ++j) {
      greatest_scale = max_u32(greatest_scale, bits_of(pack_scales[i + j]));
      greatest = max_u32(greatest, bits_of(decoded[j] * pack_scales[i + j]));
    }
  }
  greatest = pack_bf16(float_of(greatest), 0.0f) << 16;
  // With a scale that is negative, infinite or none at all, the greatest code need not give the greatest magnitude.
  if (greatest_scale >= kInfinity) {
    greatest = 0;
#pragma unroll 1
    for (int i = 0; i * kStep < reach; ++i) {
      const auto values = ByValue::load(job, item, at.e, row, first_k + i * kStep);
      greatest = max_u32(greatest, ByValue::Values::amax_bits(values.partial_amax()));
    }
  }
#pragma unroll
  for (int distance = 1; distance < kShuffled; distance *= 2) {
    greatest = max_u32(greatest, shuffle_xor(greatest, distance));
  }
  if constexpr (lanes > 32) {
    if (thread % 32 == 0) shared[thread / 32] = greatest;
    barrier();
    for (int i = 0; i < lanes / 32; ++i) greatest = max_u32(greatest, shared[thread / lanes * (lanes / 32) + i]);
  }
  const float scale = fp32_scale(greatest, kE4m3Max);
  if (live && lane == 0) {
    check_amax(item, greatest, at.e * item.n + row);
    *place<float>(item.scale, at.e, row, 0) = scale;
  }
  if (tabled) tables[thread] = table_of(table_scale, scale);
  barrier();

  uint8_t* data = place<uint8_t>(item.data, at.e, row, first_k);
  const Table* own = tables + (thread / lanes * lanes + (first_k >> 7));
  uint32_t uncovered = 0;
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    if (i * kStep >= reach) continue;
    const Table table = own[block(i)];
    Words4 found;
    uint32_t covered = kHighBits;
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = codes[i].w[j], raised = word | kHighBits;
      const uint32_t moved = raised + look_up(table.low, table.high, word & 0x07070707u) + table.first;
      covered &= raised - table.least;
      found.w[j] = select_bits(kHighBits, word, moved);
    }
    store_once(data + i * kStep, found);
    if (covered != kHighBits) uncovered |= 1u << i;
  }
  if (uncovered == 0) return;
  const Divider divider(scale, greatest);
#pragma unroll 1
  for (int i = 0; i < kCodedPacks; ++i) {
    if (((uncovered >> i) & 1u) == 0) continue;
    const auto values = ByValue::load(job, item, at.e, row, first_k + i * kStep);
    uint32_t words[kCodedLane / 4];
    encode_divided<false>(values, divider, false, words);
    store_codes(data + i * kStep, words, true, kCodedLane);
  }
}

// Rows of all lengths in one launch: each item says how many lanes share a row.
QK_DEVICE void coded_rows(const WorkList& list) {
  QK_SHARED Table tables[kCodedThreads];
  QK_SHARED uint32_t shared[kCodedThreads / 32];
  const Item& item = item_of_tile(list, block_index());
  if (item.lanes_shift == 6) {
    coded_rows_block<64>(list, item, tables, shared);
  } else if (item.lanes_shift == 4) {
    coded_rows_block<16>(list, item, tables, shared);
  } else {
    coded_rows_block<4>(list, item, tables, shared);
  }
}

QK_GLOBAL void QK_RESIDENT_BLOCKS(kCodedThreads, 4) coded_rows_kernel(QK_ARGUMENT WorkList list) { coded_rows(list); }

}  // namespace

#if defined(QK_LAUNCHERS)

bool coded_rows_fit(const Job& job, const Item& item) {
  if (job.target != kPtpcFp8 || job.layout != kRowMajor || job.fnuz || !coded_source(job, item)) return false;
  if (item.sums != nullptr || item.amax.data != nullptr || item.k % kCodedLane != 0) return false;
  const bool scales = item.col_shift == 7 && item.offset_cols % 128 == 0 && item.source_scale.stride_k == 1;
  return scales && item.k <= 64 * kCodedLane * kCodedPacks;
}

const char* launch_coded_rows(WorkList& list, int64_t stream) {
  for (int i = 0; i < list.count; ++i) {
    const int64_t k = list.items[i].k;
    list.items[i].lanes_shift = k <= 4 * kCodedLane * kCodedPacks ? 2 : (k <= 16 * kCodedLane * kCodedPacks ? 4 : 6);
  }
  const int64_t tiles = number_tiles(
      list, [](const Item& item) { return item.e * ceil_div(item.n, kCodedThreads >> item.lanes_shift); });
  return start(coded_rows_kernel, tiles, kCodedThreads, list, stream);
}

#endif

}  // namespace qk
