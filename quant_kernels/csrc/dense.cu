// Dequantization: codes times scales in fp32, rounded once to fp32, fp16 or bf16.

#include "launch.h"
#include "tiles.h"

namespace qk {
namespace {

template <class Values>
QK_DEVICE void store_elements(char* address, const Values& values) {
  for (int i = 0; i < Values::kLane; ++i) {
    if constexpr (Values::kHalves) {
      reinterpret_cast<uint16_t*>(address)[i] = static_cast<uint16_t>(values.w[i / 2] >> (i % 2 * 16));
    } else {
      reinterpret_cast<uint32_t*>(address)[i] = values.w[i];
    }
  }
}

// Packs of a lane: where a load is of 4 bytes only, more of them are wanted.
template <class Loader>
constexpr int kDensePacks = Loader::kElement == kE2m1 ? 16 : kSquarePacks;

template <class Loader, bool square>
QK_DEVICE void dense_block(const WorkList& list) {
  using Values = typename Loader::Values;
  const Job& job = list.job;
  const Item& item = item_of_tile(list, block_index());
  constexpr int kBytes = Values::kHalves ? 2 : 4;
  const auto store = [&](const Values& values, char* address) {
    if (!Loader::kCareful || item.aligned) {
      for (int part = 0; part < Values::kWords / 4; ++part) {
        const uint32_t* w = values.w + 4 * part;
        store_once(address + 16 * part, Words4{{w[0], w[1], w[2], w[3]}});
      }
    } else {
      store_elements(address, values);
    }
  };
  const auto target = [&](int64_t e, int64_t n, int64_t k) {
    return static_cast<char*>(item.data.data) + (e * item.data.stride_e + n * item.data.stride_n + k) * kBytes;
  };
  if constexpr (square) {
    constexpr int kPacks = kDensePacks<Loader>;
    const SquareTile<kPacks> at(item, block_index(), false);
    const int reach = at.reach(item);
    if (reach == 0) return;
    const auto column = Loader::column(job, item, at.e, at.n, at.k, at.row, at.lane_k());
    const int stride = static_cast<int>(item.data.stride_n) * kBytes, step = stride * kSquareStep;
    char* address = target(at.e, at.n, at.k) + (at.row * stride + at.lane_k() * kBytes);
    typename Loader::Raw raw[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i] = Loader::fetch_down(column, SquareTile<kPacks>::down(i, reach));
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (i < reach) store(Loader::decode(raw[i]), address + i * step);
    }
  } else {
    const TileStart start(item, block_index());
#pragma unroll 1
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      if (at.live) store(Loader::load(job, item, start.e, at.n, at.k), target(start.e, at.n, at.k));
    }
  }
}

template <class Loader, bool square>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kTileThreads) dense_kernel(QK_ARGUMENT WorkList list) {
  dense_block<Loader, square>(list);
}

// Rows whose length is no multiple of 8: one element a thread.
template <Element element>
QK_DEVICE void dense_elements_block(const WorkList& list) {
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const MatrixTile at(item, tile, (item.n * item.k + kTileThreads - 1) / kTileThreads);
  const int64_t index = at.index * kTileThreads + thread_index();
  const int64_t n = divide(index, item.k), k = index - n * item.k;
  if (n >= item.n) return;
  const Pack<element, 2> value = CarefulLoader<element, 2>::load(job, item, at.e, n, k);
  if constexpr (element == kF32) {
    *place<uint32_t>(item.data, at.e, n, k) = value.w[0];
  } else {
    *place<uint16_t>(item.data, at.e, n, k) = static_cast<uint16_t>(value.w[0]);
  }
}

template <Element element>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kTileThreads) dense_elements_kernel(QK_ARGUMENT WorkList list) {
  dense_elements_block<element>(list);
}

}  // namespace

#if defined(QK_LAUNCHERS)

const char* launch_dense(WorkList& list, int64_t stream) {
  bool packs = true, whole = true, square = true;
  for (int i = 0; i < list.count; ++i) {
    packs = packs && list.items[i].k % kTileLane == 0;
    whole = whole && list.items[i].aligned;
    square = square && squarish(list.items[i]);
    list.items[i].row_magic = row_magic(list.items[i].k / kTileLane);
  }
  const Job& job = list.job;
  if (!packs) {
    const int64_t tiles =
        number_tiles(list, [](const Item& item) { return item.e * ceil_div(item.n * item.k, kTileThreads); });
    if (job.through == kF32) return start(dense_elements_kernel<kF32>, tiles, kTileThreads, list, stream);
    if (job.through == kF16) return start(dense_elements_kernel<kF16>, tiles, kTileThreads, list, stream);
    return start(dense_elements_kernel<kBf16>, tiles, kTileThreads, list, stream);
  }
  const auto run = [&](auto loader) {
    using Loader = decltype(loader);
    if constexpr (!Loader::kCareful) {
      if (square) {
        const int64_t tiles = number_tiles(list, square_tiles<kDensePacks<Loader>>);
        return start(dense_kernel<Loader, true>, tiles, kTileThreads, list, stream);
      }
    }
    const int64_t tiles = number_tiles(list, [](const Item& item) { return item.e * tiles_a_matrix(item); });
    return start(dense_kernel<Loader, false>, tiles, kTileThreads, list, stream);
  };
  const auto of_element = [&]<Element through>() -> const char* {
    if (whole && job.element == kE4m3 && job.scale_type == kScaleF32) {
      return run(EncodedLoader<kE4m3, through, kTileLane, kScaleF32>{});
    }
    if (whole && job.element == kE4m3 && job.scale_type == kScaleE8m0) {
      return run(EncodedLoader<kE4m3, through, kTileLane, kScaleE8m0>{});
    }
    if (whole && job.element == kE2m1 && job.scale_type == kScaleE8m0) {
      return run(EncodedLoader<kE2m1, through, kTileLane, kScaleE8m0>{});
    }
    return run(CarefulLoader<through, kTileLane>{});
  };
  if (job.through == kF32) return of_element.template operator()<kF32>();
  if (job.through == kF16) return of_element.template operator()<kF16>();
  return of_element.template operator()<kBf16>();
}

#endif

}  // namespace qk
