// Tiles of 8,192 consecutive elements for kernels whose scale groups lie within a row: each block takes one tile, a lane a
// few packs of 8, neighbouring lanes neighbouring packs.
#pragma once

#include "device_source.h"

namespace qk {

constexpr int kTileThreads = 256;
constexpr int kTileLane = 8;
constexpr int kTilePacks = 4;  // packs of a lane: independent loads in flight
constexpr int64_t kTileElements = int64_t{kTileThreads} * kTileLane * kTilePacks;

// A pack's place.
struct Spot {
  int64_t e, n, k, row;
  bool live;
};

// Where the tiles of an item stand: the row and pack at which this block's tile begins.
struct TileStart {
  int64_t row, pack;
  uint32_t packs_a_row;

  QK_DEVICE_MEMBER TileStart(const Item& item, int64_t tile) {
    const int64_t first = (tile - item.first_tile) * (kTileElements / kTileLane);
    packs_a_row = static_cast<uint32_t>(item.k / kTileLane);
    if (item.n == 1 && item.e == 1) {
      row = 0;
      pack = first;
    } else {
      row = divide(first, packs_a_row);
      pack = first - row * packs_a_row;
    }
  }

  // The lane's pack number `index` of the tile.
  QK_DEVICE_MEMBER Spot spot(const Item& item, int index) const {
    Spot at;
    const int64_t local = pack + index * kTileThreads + thread_index();
    if (item.n == 1 && item.e == 1) {
      at = Spot{0, 0, local * kTileLane, 0, local * kTileLane < item.k};
      return at;
    }
    const uint32_t down = item.row_magic != 0
                              ? static_cast<uint32_t>((static_cast<uint64_t>(local) * item.row_magic) >> 32)
                              : static_cast<uint32_t>(local) / packs_a_row;
    at.row = row + down;
    at.k = (local - static_cast<int64_t>(down) * packs_a_row) * kTileLane;
    at.live = at.row < item.e * item.n;
    const Row found = row_of(item, at.live ? at.row : 0);
    at.e = found.e;
    at.n = found.n;
    return at;
  }
};

// Multiplier by which a pack's number is divided by the packs of a row; exact as long as their product is under 2^32.
inline uint32_t row_magic(int64_t packs_a_row) {
  const uint64_t reach = static_cast<uint64_t>(packs_a_row) + kTileElements / kTileLane;
  if (packs_a_row < 2 || reach * static_cast<uint64_t>(packs_a_row) >= (uint64_t{1} << 32)) return 0;
  return static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(packs_a_row) + 1);
}

}  // namespace qk
