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

template <class Loader>
QK_DEVICE void dense_block(const WorkList& list) {
  using Values = typename Loader::Values;
  const int64_t tile = block_index();
  const Job& job = list.job;
  const Item& item = item_of_tile(list, tile);
  const TileStart start(item, tile);
  constexpr int kBytes = Values::kHalves ? 2 : 4;
  const auto store = [&](const Values& values, const Spot& at) {
    if (!at.live) return;
    char* address =
        static_cast<char*>(item.data.data) + (start.e * item.data.stride_e + at.n * item.data.stride_n + at.k) * kBytes;
    if (!Loader::kCareful || item.aligned) {
      for (int part = 0; part < Values::kWords / 4; ++part) {
        const uint32_t* w = values.w + 4 * part;
        store_once(address + 16 * part, Words4{{w[0], w[1], w[2], w[3]}});
      }
    } else {
      store_elements(address, values);
    }
  };
  if constexpr (Loader::kCareful) {
#pragma unroll 1
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      if (at.live) store(Loader::load(job, item, start.e, at.n, at.k), at);
    }
  } else {
    Values held[kTilePacks];
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
      const Spot at = start.spot(item, i);
      if (at.live) held[i] = Loader::load(job, item, start.e, at.n, at.k);
    }
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) store(held[i], start.spot(item, i));
  }
}

template <class Loader>
QK_GLOBAL void QK_LAUNCH_BOUNDS(kTileThreads) dense_kernel(QK_ARGUMENT WorkList list) {
  dense_block<Loader>(list);
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
  bool packs = true, whole = true;
  for (int i = 0; i < list.count; ++i) {
    packs = packs && list.items[i].k % kTileLane == 0;
    whole = whole && list.items[i].aligned;
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
  const int64_t tiles =
      number_tiles(list, [](const Item& item) { return item.e * tiles_a_matrix(item); });
  const auto run = [&](auto loader) { return start(dense_kernel<decltype(loader)>, tiles, kTileThreads, list, stream); };
  const auto of_element = [&]<Element through>() -> const char* {
    if (whole && job.element == kE4m3) return run(EncodedLoader<kE4m3, through, kTileLane>{});
    if (whole && job.element == kE2m1) return run(EncodedLoader<kE2m1, through, kTileLane>{});
    return run(CarefulLoader<through, kTileLane>{});
  };
  if (job.through == kF32) return of_element.template operator()<kF32>();
  if (job.through == kF16) return of_element.template operator()<kF16>();
  return of_element.template operator()<kBf16>();
}

#endif

}  // namespace qk
