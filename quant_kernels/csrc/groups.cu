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

// `own`: the scale is that of the group's own greatest magnitude.
template <Target target, class Values>
QK_DEVICE void encode_group(const Values& values, uint32_t amax, uint32_t scale_code, float step, bool own,
                            uint32_t (&codes)[kCodeWords<target>]) {
  if constexpr (target == kMxfp4) {
    codes[0] = pack_e2m1(values, scale_code, own);
  } else if constexpr (target == kMxfp8) {
    const float factor = inverse_e8m0(scale_code);
    for (int i = 0; i < 2; ++i) {
      codes[i] = pack_e4m3(values.value(4 * i) * factor, values.value(4 * i + 1) * factor,
                           values.value(4 * i + 2) * factor, values.value(4 * i + 3) * factor);
    }
  } else {
    const Divider divider(step, amax);
    codes[0] = 0;
    if (step == 0.0f) return;
    for (int i = 0; i < kTileLane; ++i) {
      const float value = values.value(i);
      codes[0] |= encode_e2m1(divider.plain ? divider.divide_plain(value) : divider.divide(value)) << (4 * i);
    }
  }
}

// How a block's packs lie.
enum class Places {
  kFlat,  // one row of all elements, whatever the rows were: no arithmetic on rows at all
  kSquare,  // 64 rows x 256 columns
  kCdna,  // 32 rows x 256 columns in CDNA order: a block's scales are 256 bytes side by side, its codes runs of 512
  kRows,  // consecutive packs of rows: whatever the others do not take
};

// Bytes of a pack's codes.
template <Target target>
constexpr int kCodeBytes = target == kMxfp8 ? kTileLane : kTileLane / 2;

// The greatest magnitude of a pack's group, for all the lanes that share it.
template <int group, class Values>
QK_DEVICE uint32_t group_amax(const Values& values) {
  uint32_t partial = values.partial_amax();
#pragma unroll
  for (int distance = 1; distance < group / kTileLane; distance *= 2) {
    partial = Values::greater(partial, shuffle_xor(partial, distance));
  }
  return Values::amax_bits(partial);
}

template <Target target, class Values>
QK_DEVICE void add_group_errors(LaneSums& sums, const Values& values, const uint32_t (&codes)[kCodeWords<target>],
                                float step) {
  float decoded[kTileLane];
  if constexpr (target == kMxfp8) {
    unpack_e4m3(codes[0], decoded);
    unpack_e4m3(codes[1], decoded + 4);
  } else {
    unpack_e2m1(codes[0], decoded);
  }
  for (int j = 0; j < kTileLane; ++j) sums.add(values.value(j), decoded[j] * step);
}

// A block of flat packs: MXFP4 and MXFP8 of plain sources.
//
// MXFP8 moves more bytes than it computes: there all packs of a block are read before the first is stored, in rows of the whole
// block. MXFP4 has more to compute: 32 lanes go their own way, over 1,024 elements side by side.
template <class Loader, Target target, bool measured>
QK_DEVICE void flat_block(const WorkList& list, LaneSums& sums) {
  using Values = typename Loader::Values;
  constexpr bool kTogether = target == kMxfp8;
  constexpr int kStep = kTogether ? kTileThreads : 32;  // packs from one of a lane to its next
  QK_SHARED Words4 shared[kTogether ? kFlatScales / 16 : 1];
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  const int thread = thread_index(), lane = thread % 32;
  const int ahead = kTogether ? thread : thread / 32 * (32 * kFlatPacks) + lane;
  const int64_t begin = (block_index() - item.first_tile) * (kFlatElements / kTileLane);  // in packs
  const int64_t packs = item.k / kTileLane - begin;
  const int reach = (packs < kFlatPacks * kTileThreads ? static_cast<int>(packs) : kFlatPacks * kTileThreads) - ahead;
  const uint32_t rounding = scale_rounding_bits(job.rounding, target == kMxfp4 ? 4 : 8);
  auto source = Loader::row(job, item, 0, 0, begin * kTileLane);
  source.address += ahead * (kTileLane * Loader::kBytes);
  uint8_t* data = static_cast<uint8_t*>(item.data.data) + begin * kCodeBytes<target> + ahead * kCodeBytes<target>;
  uint8_t* scales = static_cast<uint8_t*>(item.scale.data) + begin / 4;

  Values held[kFlatPacks];
#pragma unroll
  for (int i = 0; i < kFlatPacks; ++i) {
    held[i] = i * kStep < reach ? Loader::fetch(source, i * kStep * kTileLane) : Loader::nothing();
  }
  uint32_t amaxes[kFlatPacks], scale_codes = 0;
  const auto see = [&](int i) {
    amaxes[i] = group_amax<32>(held[i]);
    scale_codes |= e8m0_of_amax(amaxes[i], rounding, target == kMxfp4 ? 2u : 8u) << (8 * i);
  };
  if constexpr (kTogether) {
    uint8_t* staged = reinterpret_cast<uint8_t*>(shared);
#pragma unroll
    for (int i = 0; i < kFlatPacks; ++i) {
      see(i);
      if (thread % 4 == 0) staged[(i * kStep + thread) / 4] = static_cast<uint8_t>(scale_codes >> (8 * i));
    }
    barrier();
    if (packs >= kFlatPacks * kTileThreads && reinterpret_cast<uintptr_t>(scales) % 16 == 0) {
      if (thread < kFlatScales / 16) store_once(scales + 16 * thread, shared[thread]);
    } else if (thread < packs / 4) {  // 256 scales of whole tiles, one a thread
      scales[thread] = staged[thread];
    }
  }
#pragma unroll
  for (int i = 0; i < kFlatPacks; ++i) {
    if constexpr (!kTogether) see(i);
    if (i * kStep >= reach) continue;
    const uint32_t amax = amaxes[i], scale_code = (scale_codes >> (8 * i)) & 0xffu;
    if (item.bad != nullptr && lane % 4 == 0 && amax >= kInfinity) {
      check_amax(item, amax, divide(begin + ahead + i * kStep, item.scale_k * 4));
    }
    uint32_t codes[kCodeWords<target>];
    encode_group<target>(held[i], amax, scale_code, 0.0f, true, codes);
    store_codes(data + i * kStep * kCodeBytes<target>, codes, true, 0);
    if constexpr (measured) add_group_errors<target>(sums, held[i], codes, decode_e8m0(scale_code));
  }
  if constexpr (!kTogether) {
    // Lane l stores scale l of its 32 lanes, all of them a sector: that of pack l / 8 of lane 4 (l % 8).
    static_assert(kFlatPacks == 4);
    const uint32_t four = shuffle(scale_codes, lane % 8 * 4);
    if (thread < packs / 4) scales[thread] = static_cast<uint8_t>(four >> (lane / 8 * 8));
  }
}

// A block of 256 columns: MXFP4 and MXFP8. In CDNA order its scales are gathered in shared memory.
template <class Loader, Target target, bool cdna>
QK_DEVICE void square_block(const WorkList& list) {
  using Values = typename Loader::Values;
  constexpr int kPacks = cdna ? kCdnaPacks : kSquarePacks;
  constexpr int kScales = SquareTile<kPacks>::kRows * kSquareColumns / 32;
  QK_SHARED uint32_t shared[cdna ? kScales / 4 : 1];
  uint8_t* staged = reinterpret_cast<uint8_t*>(shared);
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  const SquareTile<kPacks> at(item, block_index(), cdna);
  const uint32_t rounding = scale_rounding_bits(job.rounding, target == kMxfp4 ? 4 : 8);
  const int reach = at.reach(item);
  // A lane without packs reads the tile's first: loads need no condition.
  const int down = reach > 0 ? at.row : 0, right = reach > 0 ? at.lane_k() : 0;
  const auto column = Loader::column(job, item, at.e, at.n, at.k, down, right);

  typename Loader::Raw raw[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) raw[i] = Loader::fetch_down(column, SquareTile<kPacks>::down(i, reach));
  // Tiles begin at multiples of both orders' own tiles, so that a lane's offset from there does not depend on where that is.
  const int width = static_cast<int>(item.data.stride_n), scale_width = static_cast<int>(item.scale.stride_n);
  const int place_k = right * kCodeBytes<target> / kTileLane;
  uint8_t* data = place<uint8_t>(item.data, at.e, at.n, cdna ? 0 : at.k * kCodeBytes<target> / kTileLane);
  if constexpr (cdna) {
    data += at.k * kCodeBytes<target> / kTileLane * 16 + cdna_lane_offset(down, place_k, width);
  } else {
    data += down * width + place_k;
  }
  uint8_t* scales = cdna ? nullptr : place<uint8_t>(item.scale, at.e, at.n, at.k / 32) + (down * scale_width + right / 32);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const Values values = Loader::decode(raw[i]);
    uint32_t amax = group_amax<32>(values);
    if (i >= reach) continue;
    const int row = at.row + kSquareStep * i;
    const bool first = at.pack % 4 == 0, own = item.amax.data == nullptr;
    if (first) check_amax(item, amax, at.e * item.n + at.n + row);
    if (!own) amax = given_amax(item, at.e, at.n + row, (at.k + right) / 32);
    const uint32_t scale_code = e8m0_of_amax(amax, rounding, target == kMxfp4 ? 2u : 8u);
    if (first) {
      uint8_t* address =
          cdna ? staged + cdna_scale_offset(row, at.pack / 4, 8) : scales + i * kSquareStep * scale_width;
      *address = static_cast<uint8_t>(scale_code);
    }
    uint32_t codes[kCodeWords<target>];
    encode_group<target>(values, amax, scale_code, 0.0f, own, codes);
    // A lane's rows are 8 apart and its first is among the first 8 of a run of 16.
    store_codes(data + (cdna ? i / 2 * 16 * width + i % 2 * 128 : i * kSquareStep * width), codes, true, 0);
  }
  if constexpr (cdna) {
    barrier();
    const int thread = thread_index();
    scales = place<uint8_t>(item.scale, at.e, at.n, 0) + at.k;  // 8 groups of 32 rows: 256 bytes
    if (at.n + at.kRows <= item.n && at.k + kSquareColumns <= item.k) {
      if (thread < kScales / 4) store_once(scales + 4 * thread, Words1{{shared[thread]}});
    } else {
      const int each = thread / 8, group = thread % 8;
      if (at.n + each < item.n && at.k + group * 32 < item.k) {
        scales[cdna_scale_offset(each, group, 8)] = staged[cdna_scale_offset(each, group, 8)];
      }
    }
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

// A block of packs of rows: every target, layout and source. `target` kAmax: groups of `group`, maxima alone.
template <class Loader, Target target, int group, bool measured>
QK_DEVICE void rows_of_groups_block(const WorkList& list, LaneSums& sums) {
  using Values = typename Loader::Values;
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const TileStart start(item, tile);
  const uint32_t rounding = scale_rounding_bits(job.rounding, target == kMxfp4 ? 4 : 8);

  const auto convert = [&](const Values& values, const Spot& at) {
    uint32_t amax = group_amax<group>(values);
    if (!at.live) return;
    const bool first = thread_index() % (group / kTileLane) == 0;
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
      encode_group<target>(values, amax, scale_code, step, false, codes);
      store_group_codes<target>(job, item, start.e, at, codes, !Loader::kCareful || item.aligned);
      if constexpr (measured) add_group_errors<target>(sums, values, codes, step);
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
    typename Loader::Raw raw[kTilePacks];
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      raw[i] = Loader::nothing();
      if (at.live) raw[i] = Loader::fetch(Loader::row(job, item, start.e, at.n, at.k), 0);
    }
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) convert(Loader::decode(raw[i]), start.spot(item, i));
  }
}

template <class Loader, Target target, int group, Places places, bool measured>
QK_DEVICE void groups_block(const WorkList& list) {
  LaneSums sums;
  if constexpr (places == Places::kFlat) {
    flat_block<Loader, target, measured>(list, sums);
  } else if constexpr (places == Places::kCdna || places == Places::kSquare) {
    square_block<Loader, target, places == Places::kCdna>(list);
  } else {
    rows_of_groups_block<Loader, target, group, measured>(list, sums);
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
      const Item& item = item_of_tile(list, block_index());
      double total = 0;
      for (int i = 0; i < kTileThreads / 32; ++i) total += static_cast<double>(shared[2 * i + thread]);
      item.sums[2 * (block_index() - item.first_tile) + thread] = total;
    }
  }
}

// Kernels that wait for memory more than they compute do better with more registers: more of their loads are on their way.
template <class Values, Target target, Places places>
constexpr int kResidentBlocks = places == Places::kFlat && (target == kMxfp8 || !Values::kHalves) ? 1 : 0;

template <class Loader, Target target, int group, Places places, bool measured>
QK_GLOBAL void QK_RESIDENT_BLOCKS(kTileThreads, (kResidentBlocks<typename Loader::Values, target, places>)) groups_kernel(QK_ARGUMENT WorkList list) {
  groups_block<Loader, target, group, places, measured>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

namespace {

template <class Loader, Target target, int group, Places places>
const char* launch_placed(WorkList& list, int64_t stream) {
  constexpr bool square = places == Places::kCdna || places == Places::kSquare;
  const int64_t tiles = number_tiles(list, [](const Item& item) {
    if (places == Places::kFlat) return ceil_div(item.k, kFlatElements);
    if (places == Places::kCdna) return square_tiles<kCdnaPacks>(item);
    return places == Places::kSquare ? square_tiles<kSquarePacks>(item) : item.e * tiles_a_matrix(item);
  });
  // Fast kernels of rows are built without measures: the careful ones have them.
  constexpr bool measures = target != kAmax && (places == Places::kFlat || (Loader::kCareful && !square));
  if constexpr (measures) {
    if (list.items[0].sums != nullptr) {
      return qk::start(groups_kernel<Loader, target, group, places, true>, tiles, kTileThreads, list, stream);
    }
  }
  return qk::start(groups_kernel<Loader, target, group, places, false>, tiles, kTileThreads, list, stream);
}

// The careful form of a loader: it takes any place.
template <class Loader>
using Careful = CarefulLoader<Loader::Values::kElement, kTileLane>;

template <class Loader, Target target, int group>
const char* launch(WorkList& list, int64_t stream) {
  const bool measured = list.items[0].sums != nullptr;
  if constexpr (!Loader::kCareful && (target == kMxfp4 || target == kMxfp8)) {
    bool flat = Loader::kPlain && list.job.layout != kCdna, square = !measured;
    for (int i = 0; i < list.count; ++i) {
      const Item& item = list.items[i];
      flat = flat && item.n == 1 && item.e == 1 && item.amax.data == nullptr;
      square = square && squarish(item);
    }
    if (list.job.layout == kCdna && !measured) {
      return launch_placed<Loader, target, group, Places::kCdna>(list, stream);
    }
    if constexpr (Loader::kPlain) {
      if (flat) return launch_placed<Loader, target, group, Places::kFlat>(list, stream);
    }
    if (square) return launch_placed<Loader, target, group, Places::kSquare>(list, stream);
  } else if constexpr (!Loader::kCareful) {
    if (!measured) return launch_placed<Loader, target, group, Places::kRows>(list, stream);
  }
  return launch_placed<Careful<Loader>, target, group, Places::kRows>(list, stream);
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
