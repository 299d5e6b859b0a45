// MXFP4 of e4m3 codes in large blocks, by the steps of coded.h: a lane has 16 codes of 8 rows under one scale. A code's e2m1
// magnitude is the number of thresholds at or below it, which lie at the same distance from each other in every group.

#include "coded.h"
#include "launch.h"

namespace qk {
namespace {

constexpr int kCodedThreads = 256;
constexpr int kCodedLane = 16;
constexpr int kCodedColumns = 256;
constexpr int kCodedStep = kCodedThreads * kCodedLane / kCodedColumns;  // rows from a lane's pack to its next
constexpr int kCodedPacks = 8;
constexpr int kCodedRows = kCodedStep * kCodedPacks;

// Groups whose greatest code is one of these have nothing but zeros among the subnormal codes, which thresholds do not cover.
constexpr uint32_t kLeastCode = 48, kGreatestCode = 126;

// What the codes of one source scale become.
struct Thresholds {
  Octave octave;
  int rising;  // codes from here on have E8M0 byte -2, from 8 further on -1, and so on
  // Thresholds above 8 (byte + 2), in each byte.
  uint32_t quarter, three_quarters, five_quarters, seven_quarters, five_halves;
  int last_even, last_odd;  // the same of 3.5 and 5, which may be beyond all codes

  QK_DEVICE_MEMBER Thresholds(float scale, uint32_t rounding) : octave(scale) {
    rising = octave.reaching(-static_cast<int>(rounding >> 16));
    // Ties go to even codes: 0.25, 1.25, 2.5 and 5 are rounded down, 0.75, 1.75 and 3.5 up.
    const int five = octave.reaching(33) - 16, seven = octave.reaching(96) - 16;
    quarter = in_each_byte(octave.reaching(1) - 32);
    three_quarters = in_each_byte(octave.reaching(64) - 24);
    five_quarters = in_each_byte(five);
    seven_quarters = in_each_byte(seven);
    five_halves = in_each_byte(five + 8);
    last_even = seven + 8;
    last_odd = five + 16;
  }
};

// The thresholds of one group.
struct GroupThresholds {
  uint32_t base, sixth, seventh;

  QK_DEVICE_MEMBER GroupThresholds(const Thresholds& all, int height) {
    const int above = height & ~7;
    const int even = above + all.last_even, odd = above + all.last_odd;
    base = in_each_byte(above);
    sixth = in_each_byte(even < 128 ? even : 128);
    seventh = in_each_byte(odd < 128 ? odd : 128);
  }
};

// One bit of four codes each, in the high bits of bytes.
struct Planes {
  uint32_t sign, four, two, one;

  // `raised`: the codes with their high bits set.
  QK_DEVICE_MEMBER Planes(uint32_t codes, uint32_t raised, const Thresholds& all, const GroupThresholds& group) {
    const uint32_t above = raised - group.base;
    const uint32_t t1 = above - all.quarter, t2 = above - all.three_quarters, t3 = above - all.five_quarters;
    const uint32_t t4 = above - all.seven_quarters, t5 = above - all.five_halves;
    const uint32_t t6 = raised - group.sixth, t7 = raised - group.seventh;
    // The high bit of t_i says whether the code has reached threshold i; as they are ordered, the binary count is this.
    sign = codes;
    four = t4;
    two = (t2 & ~t4) | t6;
    one = t1 ^ t2 ^ t3 ^ t4 ^ t5 ^ t6 ^ t7;
  }

  // Four bits in the high half of each byte.
  QK_DEVICE_MEMBER uint32_t nibbles() const {
    const uint32_t upper = select_bits(kHighBits, sign, four >> 1), lower = select_bits(kHighBits, two, one >> 1);
    return select_bits(0xc0c0c0c0u, upper, lower >> 2);
  }
};

// e2m1 codes of 8 e4m3 codes, the even and the odd ones apart.
QK_DEVICE uint32_t encode_codes(const uint32_t* codes, const uint32_t* raised, const Thresholds& all,
                                const GroupThresholds& group) {
  const Planes even(codes[0], raised[0], all, group), odd(codes[1], raised[1], all, group);
  return select_bits(0xf0f0f0f0u, odd.nibbles(), even.nibbles() >> 4);
}

// A lane's pack of a group that thresholds do not cover, by its values. All of the group is read again: lanes may be alone.
QK_DEVICE void convert_by_value(const Job& job, const Item& item, int64_t e, int64_t n, int64_t k, uint32_t rounding) {
  using Loader = EncodedLoader<kE4m3, kBf16, 8, kScaleF32>;
  using Values = typename Loader::Values;
  const int64_t group = k & ~int64_t{31};
  uint32_t partial = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    partial = Values::greater(partial, Loader::load(job, item, e, n, group + 8 * i).partial_amax());
  }
  const uint32_t amax = Values::amax_bits(partial);
  const uint32_t scale_code = e8m0_of_amax(amax, rounding, 2u);
  if (k == group) {
    check_amax(item, amax, e * item.n + n);
    *place<uint8_t>(item.scale, e, n, k / 32) = static_cast<uint8_t>(scale_code);
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Values values = Loader::load(job, item, e, n, k + 8 * i);
    store_once(place<uint8_t>(item.data, e, n, k / 2 + 4 * i), Words1{{pack_e2m1(values, scale_code)}});
  }
}

QK_DEVICE void coded_groups_block(const WorkList& list) {
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  const uint32_t across = static_cast<uint32_t>((item.k + kCodedColumns - 1) / kCodedColumns);
  const MatrixTile at(item, block_index(), across * ((item.n + kCodedRows - 1) / kCodedRows));
  const uint32_t index = static_cast<uint32_t>(at.index), down = across == 1 ? index : index / across;
  const int64_t n = int64_t{down} * kCodedRows, k = int64_t{index - down * across} * kCodedColumns;
  const int thread = thread_index(), row = thread / (kCodedColumns / kCodedLane);
  const int column = thread % (kCodedColumns / kCodedLane) * kCodedLane;
  const int64_t rows = item.n - n - row;
  const int whole = rows >= kCodedRows ? kCodedPacks : static_cast<int>((rows + kCodedStep - 1) / kCodedStep);
  const int reach = column < item.k - k && rows > 0 ? whole : 0;
  // A lane without packs reads the tile's first: loads need no condition.
  const int row_read = reach > 0 ? row : 0, column_read = reach > 0 ? column : 0;
  const int stride = static_cast<int>(item.source.stride_n);
  const uint8_t* source = place<const uint8_t>(item.source, at.e, n, k) + row_read * stride + column_read;

  Words4 codes[kCodedPacks];
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) codes[i] = load_once<Words4>(source + (i < reach ? i * kCodedStep * stride : 0));
  const float scale = *place<const float>(item.source_scale, at.e, (n + item.offset_rows) >> item.row_shift,
                                          (k + column_read + item.offset_cols) >> item.col_shift);
  const uint32_t rounding = scale_rounding_bits(job.rounding, 4);
  const Thresholds thresholds(scale, rounding);
  const int data_stride = static_cast<int>(item.data.stride_n), scale_stride = static_cast<int>(item.scale.stride_n);
  uint8_t* data = place<uint8_t>(item.data, at.e, n, k / 2) + row_read * data_stride + column_read / 2;
  uint8_t* scales = place<uint8_t>(item.scale, at.e, n, k / 32) + row_read * scale_stride + column_read / 32;
  const int64_t data_step = int64_t{kCodedStep} * data_stride, scale_step = int64_t{kCodedStep} * scale_stride;
  const uint32_t least = usual_scale(scale) ? kLeastCode : kGreatestCode + 1;
  uint32_t uncovered = 0;
#pragma unroll
  for (int i = 0; i < kCodedPacks; ++i) {
    const uint32_t* w = codes[i].w;
    const uint32_t apart[4] = {even_bytes(w[0], w[1]), odd_bytes(w[0], w[1]), even_bytes(w[2], w[3]), odd_bytes(w[2], w[3])};
    const uint32_t raised[4] = {apart[0] | kHighBits, apart[1] | kHighBits, apart[2] | kHighBits, apart[3] | kHighBits};
    uint32_t greatest = greatest_raised(raised);
    greatest = max_u32(greatest, shuffle_xor(greatest, 1));
    if (i >= reach) continue;
    const int height = static_cast<int>(greatest) - thresholds.rising;
    const GroupThresholds group(thresholds, height);
    const uint32_t first = encode_codes(apart, raised, thresholds, group);
    const uint32_t second = encode_codes(apart + 2, raised + 2, thresholds, group);
    if (greatest < least || greatest > kGreatestCode) {
      uncovered |= 1u << i;
    } else {
      if (thread % 2 == 0) *scales = static_cast<uint8_t>((height >> 3) - 2);
      store_once(data, Words2{{first, second}});
    }
    data += data_step;
    scales += scale_step;
  }
  if (uncovered == 0) return;
#pragma unroll 1
  for (int i = 0; i < kCodedPacks; ++i) {
    if ((uncovered >> i) & 1u) convert_by_value(job, item, at.e, n + row + i * kCodedStep, k + column, rounding);
  }
}

QK_GLOBAL void QK_RESIDENT_BLOCKS(kCodedThreads, 4) coded_groups_kernel(QK_ARGUMENT WorkList list) { coded_groups_block(list); }

}  // namespace

#if defined(QK_LAUNCHERS)

// Whether each group, and each lane's column of a tile, lies under one scale.
bool coded_groups_fit(const Job& job, const Item& item) {
  if (job.target != kMxfp4 || job.layout != kRowMajor || !coded_source(job, item)) return false;
  if (item.sums != nullptr || item.amax.data != nullptr || item.n < kCodedStep || item.k % 32 != 0) return false;
  const bool rows = item.row_shift >= 62 || (item.row_shift >= 7 && item.offset_rows % kCodedRows == 0);
  return rows && item.col_shift >= 5 && item.offset_cols % 32 == 0;
}

const char* launch_coded_groups(WorkList& list, int64_t stream) {
  const int64_t tiles = number_tiles(list, [](const Item& item) {
    return item.e * ceil_div(item.n, kCodedRows) * ceil_div(item.k, kCodedColumns);
  });
  return start(coded_groups_kernel, tiles, kCodedThreads, list, stream);
}

#endif

}  // namespace qk
