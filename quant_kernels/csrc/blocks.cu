// Per-block FP8: one scale a tile of 128 x 128, which a block of 256 threads holds in registers. Edge tiles may be partial.
// Also the maxima of such tiles alone.

#include "launch.h"
#include "layout.h"

namespace qk {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kSide = 128;
constexpr int kBlockLane = 8;
constexpr int kLanesARow = kSide / kBlockLane;             // 16
constexpr int kRowsAPass = kBlockThreads / kLanesARow;     // 16
constexpr int kPasses = kSide / kRowsAPass;           // 8

template <class Loader, bool measured>
QK_DEVICE void tile_block(const WorkList& list) {
  using Values = typename Loader::Values;
  QK_SHARED uint32_t shared[kBlockThreads / 32];
  QK_SHARED float shared_sums[2 * (kBlockThreads / 32)];
  const int thread = thread_index();
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const int64_t across = (item.k + kSide - 1) / kSide, down = (item.n + kSide - 1) / kSide;
  const MatrixTile at(item, tile, across * down);
  const int64_t e = at.e, stripe = static_cast<uint32_t>(at.index) / static_cast<uint32_t>(across);
  const int64_t column = at.index - stripe * across;
  const int64_t k = column * kSide + thread % kLanesARow * kBlockLane;

  const int64_t first_row = stripe * kSide + thread / kLanesARow;
  const auto load = [&](int pass) {
    const int64_t n = first_row + pass * kRowsAPass;
    Values values;
    values.clear();
    if (n < item.n && k < item.k) values = Loader::load(job, item, e, n, k);
    return values;
  };
  // How many of the lane's packs lie in the matrix.
  const int64_t rows = k < item.k ? item.n - first_row : 0;
  const int reach = rows >= kSide ? kPasses : (rows <= 0 ? 0 : static_cast<int>((rows + kRowsAPass - 1) / kRowsAPass));
  // A careful kernel loads twice instead: its loops are not unrolled, which keeps it small.
  Values held[Loader::kCareful ? 1 : kPasses];
  uint32_t partial = 0;
  int bad_pass = kPasses;
  const auto see = [&](const Values& values, int pass) {
    const uint32_t found = values.partial_amax();
    if (item.bad != nullptr && bad_pass == kPasses && Values::amax_bits(found) >= kInfinity) bad_pass = pass;
    partial = Values::greater(partial, found);
  };
  if constexpr (Loader::kCareful) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) see(load(i), i);
  } else {
    const int down = reach > 0 ? thread / kLanesARow : 0, right = reach > 0 ? thread % kLanesARow * kBlockLane : 0;
    const auto column_of = Loader::column(job, item, e, stripe * kSide, column * kSide, down, right);
    typename Loader::Raw raw[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) raw[i] = Loader::fetch_down(column_of, i < reach ? i * kRowsAPass : 0);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      held[i] = Loader::decode(raw[i]);
      if (i >= reach) held[i].clear();
      see(held[i], i);
    }
  }
  if (bad_pass < kPasses) {
    atomic_min(item.bad + 1, e * item.n + stripe * kSide + bad_pass * kRowsAPass + thread / kLanesARow);
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    partial = Values::greater(partial, shuffle_xor(partial, distance));
  }
  if (thread % 32 == 0) shared[thread / 32] = partial;
  barrier();
  for (int i = 0; i < kBlockThreads / 32; ++i) partial = Values::greater(partial, shared[i]);
  const uint32_t greatest = Values::amax_bits(partial);
  uint32_t amax = greatest;
  if (thread == 0 && item.bad != nullptr && amax >= kInfinity) atomic_add(item.bad, 1);
  if (job.target == kAmax) {
    if (thread == 0) *place<uint32_t>(item.scale, e, stripe, column) = amax > kInfinity ? kQuietNan : amax;
    return;
  }
  if (item.amax.data != nullptr) amax = given_amax(item, e, stripe, column);
  const float scale = fp32_scale(amax, kE4m3Max);
  if (thread == 0) *place<float>(item.scale, e, stripe, column) = scale;
  const Divider divider(scale, greatest);
  LaneSums sums;
  uint8_t* data = place<uint8_t>(item.data, e, job.layout == kCdna ? 0 : first_row, job.layout == kCdna ? 0 : k);
  const int64_t step = item.data.stride_n * kRowsAPass;
  const auto convert = [&]<bool plain>(const Values& values, int pass) {
    if (pass >= reach) return;
    uint32_t codes[kBlockLane / 4];
    encode_divided<plain>(values, divider, false, codes);
    const int64_t left = item.k - k;
    uint8_t* address = job.layout == kCdna ? data + cdna_weight_offset(first_row + pass * kRowsAPass, k, item.k)
                                           : data + pass * step;
    store_codes(address, codes, !Loader::kCareful || (item.aligned && left >= kBlockLane),
                left < kBlockLane ? static_cast<int>(left) : kBlockLane);
    if constexpr (measured) {
      for (int j = 0; j < kBlockLane; ++j) {
        if (j < left) sums.add(values.value(j), decode_e4m3((codes[j / 4] >> (j % 4 * 8)) & 0xffu) * scale);
      }
    }
  };
  if constexpr (Loader::kCareful) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) convert.template operator()<false>(load(i), i);
  } else if (divider.plain) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) convert.template operator()<true>(held[i], i);
  } else {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) convert.template operator()<false>(held[i], i);
  }
  if constexpr (measured) {
    sums.reduce(32);
    if (thread % 32 == 0) {
      shared_sums[thread / 32 * 2] = sums.squares;
      shared_sums[thread / 32 * 2 + 1] = sums.errors;
    }
    barrier();
    if (thread < 2) {
      double total = 0;
      for (int i = 0; i < kBlockThreads / 32; ++i) total += static_cast<double>(shared_sums[2 * i + thread]);
      item.sums[2 * (tile - item.first_tile) + thread] = total;
    }
  }
}

template <class Loader, bool measured>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kBlockThreads) blocks_kernel(QK_ARGUMENT WorkList list) {
  tile_block<Loader, measured>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

const char* launch_blocks(WorkList& list, int64_t stream) {
  const int64_t tiles = number_tiles(
      list, [](const Item& item) { return item.e * ceil_div(item.n, kSide) * ceil_div(item.k, kSide); });
  return with_loader<GroupLanes>(list, [&](auto loader) -> const char* {
    using Loader = decltype(loader);
    return list.items[0].sums != nullptr ? start(blocks_kernel<Loader, true>, tiles, kBlockThreads, list, stream)
                                         : start(blocks_kernel<Loader, false>, tiles, kBlockThreads, list, stream);
  });
}

#endif

}  // namespace qk
