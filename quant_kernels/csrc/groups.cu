// MXFP4, MXFP8 and NVFP4: one scale a run of 32 or 16 elements of a row, shared by 4 or 2 neighbouring lanes. Also the
// maxima of such runs alone.

#include "launch.h"
#include "layout.h"
#include "tiles.h"

namespace qk {
namespace {

// Codes of a pack: 4-bit ones in one word, 8-bit ones in two.
template <Target target>
constexpr int kCodeWords = target == kMxfp8 ? 2 : 1;

template <Target target, class Values>
QK_DEVICE void encode_group(const Values& values, uint32_t scale_code, float step, uint32_t (&codes)[kCodeWords<target>]) {
  if constexpr (target == kMxfp4) {
    codes[0] = pack_e2m1(values, scale_code);
  } else if constexpr (target == kMxfp8) {
    const float factor = inverse_e8m0(scale_code);
    for (int i = 0; i < 2; ++i) {
      codes[i] = pack_e4m3(values.value(4 * i) * factor, values.value(4 * i + 1) * factor,
                           values.value(4 * i + 2) * factor, values.value(4 * i + 3) * factor);
    }
  } else {
    codes[0] = 0;
    for (int i = 0; i < kTileLane; ++i) codes[0] |= nvfp4_code(values.value(i), step) << (4 * i);
  }
}

template <Target target>
QK_DEVICE void store_group_codes(const Job& job, const Item& item, int64_t e, const Spot& at,
                                 const uint32_t (&codes)[kCodeWords<target>], bool whole) {
  constexpr int kPerByte = target == kMxfp8 ? 1 : 2;
  uint8_t* address;
  if (job.layout == kCdna) {
    address = place<uint8_t>(item.data, e, 0, 0) + cdna_weight_offset(at.n, at.k / kPerByte, item.k / kPerByte);
  } else {
    address = place<uint8_t>(item.data, e, at.n, at.k / kPerByte);
  }
  store_codes(address, codes, whole, kTileLane / kPerByte);
}

// `target` kAmax: groups of `group`, maxima alone.
template <class Loader, Target target, int group, bool measured>
QK_DEVICE void groups_block(const WorkList& list) {
  using Values = typename Loader::Values;
  constexpr int kSharers = group / kTileLane;
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const TileStart start(item, tile);
  const uint32_t rounding = scale_rounding_bits(job.rounding, target == kMxfp4 ? 4 : 8);

  LaneSums sums;
  const auto convert = [&](const Values& values, const Spot& at) {
    uint32_t partial = values.partial_amax();
    for (int distance = 1; distance < kSharers; distance *= 2) {
      partial = Values::greater(partial, shuffle_xor(partial, distance));
    }
    uint32_t amax = Values::amax_bits(partial);
    if (!at.live) return;
    const bool first = thread_index() % kSharers == 0;
    const int64_t column = at.k / group;
    if (first) check_amax(item, amax, (start.e * item.n + at.n));
    if constexpr (target == kAmax) {
      if (first) *place<uint32_t>(item.scale, start.e, at.n, column) = amax > kInfinity ? kQuietNan : amax;
      return;
    } else {
      uint32_t scale_code;
      float step = 0.0f;
      if constexpr (target == kNvfp4) {
        const float second = nvfp4_second_scale(given_amax(item, start.e, 0, 0));
        scale_code = nvfp4_scale(amax, second);
        step = decode_e4m3(scale_code) * second;
        if (at.n == 0 && at.k == 0) *place<float>(item.second, start.e, 0, 0) = second;
      } else {
        if (item.amax.data != nullptr) amax = given_amax(item, start.e, at.n, column);
        scale_code = e8m0_of_amax(amax, rounding, target == kMxfp4 ? 2u : 8u);
        if constexpr (measured) step = decode_e8m0(scale_code);
      }
      if (first) {
        uint8_t* address = job.layout == kCdna && target != kNvfp4
                               ? place<uint8_t>(item.scale, start.e, 0, 0) + cdna_scale_offset(at.n, column, item.scale_k)
                               : place<uint8_t>(item.scale, start.e, at.n, column);
        *address = static_cast<uint8_t>(scale_code);
      }
      uint32_t codes[kCodeWords<target>];
      encode_group<target>(values, scale_code, step, codes);
      store_group_codes<target>(job, item, start.e, at, codes, !Loader::kCareful || item.aligned);
      if constexpr (measured) {
        for (int j = 0; j < kTileLane; ++j) {
          const float decoded = target == kMxfp8 ? decode_e4m3((codes[j / 4 % kCodeWords<target>] >> (j % 4 * 8)) & 0xffu)
                                                 : decode_e2m1((codes[0] >> (4 * j)) & 15u);
          sums.add(values.value(j), decoded * step);
        }
      }
    }
  };
  if constexpr (Loader::kCareful) {
#pragma unroll 1
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      Values values;
      values.clear();
      if (at.live) values = Loader::load(job, item, start.e, at.n, at.k);
      convert(values, at);
    }
  } else {
    Values held[kTilePacks];
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      held[i].clear();
      if (at.live) held[i] = Loader::load(job, item, start.e, at.n, at.k);
    }
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) convert(held[i], start.spot(item, i));
  }
  if constexpr (measured) {
    QK_SHARED float shared[2 * (kTileThreads / 32)];
    sums.reduce(32);
    const int thread = thread_index();
    if (thread % 32 == 0) {
      shared[thread / 32 * 2] = sums.squares;
      shared[thread / 32 * 2 + 1] = sums.errors;
    }
    barrier();
    if (thread < 2) {
      double total = 0;
      for (int i = 0; i < kTileThreads / 32; ++i) total += static_cast<double>(shared[2 * i + thread]);
      item.sums[2 * (tile - item.first_tile) + thread] = total;
    }
  }
}

template <class Loader, Target target, int group, bool measured>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kTileThreads) groups_kernel(QK_ARGUMENT WorkList list) {
  groups_block<Loader, target, group, measured>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

namespace {

template <class Loader, Target target, int group>
const char* launch(WorkList& list, int64_t stream) {
  const int64_t tiles =
      number_tiles(list, [](const Item& item) { return item.e * tiles_a_matrix(item); });
  if constexpr (target != kAmax) {
    if (list.items[0].sums != nullptr) {
      return qk::start(groups_kernel<Loader, target, group, true>, tiles, kTileThreads, list, stream);
    }
  }
  return qk::start(groups_kernel<Loader, target, group, false>, tiles, kTileThreads, list, stream);
}

}  // namespace

const char* launch_groups(WorkList& list, int64_t stream) {
  for (int i = 0; i < list.count; ++i) list.items[i].row_magic = row_magic(list.items[i].k / kTileLane);
  return with_loader<GroupLanes>(list, [&](auto loader) -> const char* {
    using Loader = decltype(loader);
    switch (list.job.target) {
      case kMxfp4: return launch<Loader, kMxfp4, 32>(list, stream);
      case kMxfp8: return launch<Loader, kMxfp8, 32>(list, stream);
      case kNvfp4: return launch<Loader, kNvfp4, 16>(list, stream);
      default:
        return list.job.amax_cols == 16 ? launch<Loader, kAmax, 16>(list, stream)
                                        : launch<Loader, kAmax, 32>(list, stream);
    }
  });
}

#endif

}  // namespace qk
