// Tiles of 8,192 consecutive elements for kernels whose scale groups lie within a row: each block takes one tile, a lane a
// few packs of 8, neighbouring lanes neighbouring packs.
#pragma once

#include "device_source.h"

namespace qk {

constexpr int kTileThreads = 256;
constexpr int kTileLane = 8;
constexpr int kTilePacks = 4;  // packs of a lane: independent loads in flight
constexpr int64_t kTileElements = int64_t{kTileThreads} * kTileLane * kTilePacks;

QK_FN int64_t tiles_a_matrix(const Item& item) { return (item.n * item.k + kTileElements - 1) / kTileElements; }

// A pack's place in its matrix.
struct Spot {
  int64_t n, k;
  bool live;
};

// A block's tile: its matrix, and the row and pack of that matrix at which it begins.
struct TileStart {
  int64_t e, row, pack;
  uint32_t packs_a_row;
  bool one_row;

  QK_DEVICE_MEMBER TileStart(const Item& item, int64_t tile) {
    const MatrixTile at(item, tile, tiles_a_matrix(item));
    const int64_t first = at.index * (kTileElements / kTileLane);
    e = at.e;
    one_row = item.n == 1;
    packs_a_row = static_cast<uint32_t>(item.k / kTileLane);
    row = one_row ? 0 : divide(first, packs_a_row);
    pack = one_row ? first : first - row * packs_a_row;
  }

  // The lane's pack number `index` of the tile.
  QK_DEVICE_MEMBER Spot spot(const Item& item, int index) const {
    const int64_t local = pack + index * kTileThreads + thread_index();
    if (one_row) return Spot{0, local * kTileLane, local * kTileLane < item.k};
    const uint32_t down = item.row_magic != 0
                              ? static_cast<uint32_t>((static_cast<uint64_t>(local) * item.row_magic) >> 32)
                              : static_cast<uint32_t>(local) / packs_a_row;
    const int64_t n = row + down;
    return Spot{n, (local - static_cast<int64_t>(down) * packs_a_row) * kTileLane, n < item.n};
  }
};

// Multiplier by which a pack's number is divided by the packs of a row; exact as long as their product is under 2^32.
inline uint32_t row_magic(int64_t packs_a_row) {
  const uint64_t reach = static_cast<uint64_t>(packs_a_row) + kTileElements / kTileLane;
  if (packs_a_row < 2 || reach * static_cast<uint64_t>(packs_a_row) >= (uint64_t{1} << 32)) return 0;
  return static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(packs_a_row) + 1);
}

}  // namespace qk
