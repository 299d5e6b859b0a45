// Per-block FP8: one scale a tile of 128 x 128, which a block of 256 threads holds in registers. Edge tiles may be partial.
// Also the maxima of such tiles alone.

#include "launch.h"
#include "layout.h"

namespace qk {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 128;
constexpr int kLane = 8;
constexpr int kLanesARow = kSide / kLane;             // 16
constexpr int kRowsAPass = kThreads / kLanesARow;     // 16
constexpr int kPasses = kSide / kRowsAPass;           // 8

template <class Loader, bool measured>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kThreads) blocks_kernel(QK_ARGUMENT WorkList list) {
  using Values = typename Loader::Values;
  QK_SHARED uint32_t shared[kThreads / 32];
  QK_SHARED float shared_sums[2 * (kThreads / 32)];
  const int thread = thread_index();
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const int64_t across = (item.k + kSide - 1) / kSide, down = (item.n + kSide - 1) / kSide;
  const int64_t local = tile - item.first_tile;
  const int64_t tile_row = divide(local, across), column = local - tile_row * across;
  const int64_t e = divide(tile_row, down), stripe = tile_row - e * down;
  const int64_t k = column * kSide + thread % kLanesARow * kLane;

  const auto load = [&](int pass) {
    const int64_t n = stripe * kSide + pass * kRowsAPass + thread / kLanesARow;
    Values values;
    values.clear();
    if (n < item.n && k < item.k) values = Loader::load(job, item, e, n, k);
    return values;
  };
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
#pragma unroll
    for (int i = 0; i < kPasses; ++i) held[i] = load(i);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) see(held[i], i);
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
  for (int i = 0; i < kThreads / 32; ++i) partial = Values::greater(partial, shared[i]);
  uint32_t amax = Values::amax_bits(partial);
  if (thread == 0 && item.bad != nullptr && amax >= kInfinity) atomic_add(item.bad, 1);
  if (job.target == kAmax) {
    if (thread == 0) *place<uint32_t>(item.scale, e, stripe, column) = amax > kInfinity ? kQuietNan : amax;
    return;
  }
  if (item.amax.data != nullptr) amax = given_amax(item, e, stripe, column);
  const float scale = fp32_scale(amax, kE4m3Max);
  if (thread == 0) *place<float>(item.scale, e, stripe, column) = scale;
  const Divider divider(scale);
  LaneSums sums;
  const auto convert = [&](const Values& values, int pass) {
    const int64_t n = stripe * kSide + pass * kRowsAPass + thread / kLanesARow;
    if (n >= item.n || k >= item.k) return;
    uint32_t codes[kLane / 4];
    encode_divided(values, divider, false, codes);
    const int64_t left = item.k - k;
    uint8_t* address = job.layout == kCdna ? place<uint8_t>(item.data, e, 0, 0) + cdna_weight_offset(n, k, item.k)
                                           : place<uint8_t>(item.data, e, n, k);
    store_codes(address, codes, !Loader::kCareful || (item.aligned && left >= kLane),
                left < kLane ? static_cast<int>(left) : kLane);
    if constexpr (measured) {
      for (int j = 0; j < kLane; ++j) {
        if (j < left) sums.add(values.value(j), decode_e4m3((codes[j / 4] >> (j % 4 * 8)) & 0xffu) * scale);
      }
    }
  };
  if constexpr (Loader::kCareful) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) convert(load(i), i);
  } else {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) convert(held[i], i);
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
      for (int i = 0; i < kThreads / 32; ++i) total += static_cast<double>(shared_sums[2 * i + thread]);
      item.sums[2 * local + thread] = total;
    }
  }
}

}  // namespace

#if defined(QK_LAUNCHERS)

const char* launch_blocks(WorkList& list, int64_t stream) {
  const int64_t tiles = number_tiles(
      list, [](const Item& item) { return item.e * ceil_div(item.n, kSide) * ceil_div(item.k, kSide); });
  return with_loader<GroupLanes>(list, [&](auto loader) -> const char* {
    using Loader = decltype(loader);
    return list.items[0].sums != nullptr ? start(blocks_kernel<Loader, true>, tiles, kThreads, list, stream)
                                         : start(blocks_kernel<Loader, false>, tiles, kThreads, list, stream);
  });
}

#endif

}  // namespace qk
