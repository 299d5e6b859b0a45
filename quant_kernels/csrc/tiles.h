// Tiles of 8,192 consecutive elements for kernels whose scale groups lie within a row: each block takes one tile, a lane a
// few packs of 8, neighbouring lanes neighbouring packs.
#pragma once

#include "encode.h"

namespace qk {

constexpr int kTileThreads = 256;
constexpr int kTileLane = 8;
constexpr int kTilePacks = 4;  // packs of a lane: independent loads in flight
constexpr int64_t kTileElements = int64_t{kTileThreads} * kTileLane * kTilePacks;

// Blocks of kernels that need no place at all.
constexpr int kFlatPacks = 4;
constexpr int64_t kFlatElements = int64_t{kTileThreads} * kTileLane * kFlatPacks;
constexpr int kFlatScales = static_cast<int>(kFlatElements / 32);

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
    const uint32_t ahead = static_cast<uint32_t>(index * kTileThreads + thread_index());
    if (one_row) return Spot{0, (pack + ahead) * kTileLane, (pack + ahead) * kTileLane < item.k};
    const uint32_t local = static_cast<uint32_t>(pack) + ahead;
    const uint32_t down = item.row_magic != 0
                              ? static_cast<uint32_t>((static_cast<uint64_t>(local) * item.row_magic) >> 32)
                              : local / packs_a_row;
    const int64_t n = row + down;
    return Spot{n, static_cast<int64_t>((local - down * packs_a_row) * kTileLane), n < item.n};
  }
};

// Tiles of 256 columns: a lane keeps its column of 8 elements and takes `packs` rows 8 apart, so that what belongs to the
// column is found once. A warp takes whole rows, or (CDNA order) 4 rows of 64 columns, which are runs of stored codes.
constexpr int kSquareColumns = 256, kSquareStep = 8, kSquarePacks = 8, kCdnaPacks = 4;

template <int packs>
struct SquareTile {
  static constexpr int kRows = packs * kSquareStep;
  int64_t e, n, k;  // where the tile begins: the same for all lanes
  int row, pack;  // of the lane's first pack, within the tile

  QK_DEVICE_MEMBER SquareTile(const Item& item, int64_t tile, bool cdna) {
    const uint32_t across = static_cast<uint32_t>((item.k + kSquareColumns - 1) / kSquareColumns);
    const MatrixTile at(item, tile, across * ((item.n + kRows - 1) / kRows));
    const uint32_t index = static_cast<uint32_t>(at.index), down = across == 1 ? index : index / across;
    const int thread = thread_index();
    e = at.e;
    n = int64_t{down} * kRows;
    k = int64_t{index - down * across} * kSquareColumns;
    row = cdna ? thread / 128 * 4 + thread % 32 / 8 : thread / 32;
    pack = cdna ? thread / 32 % 4 * 8 + thread % 8 : thread % 32;
  }

  // The lane's first column.
  QK_DEVICE_MEMBER int lane_k() const { return pack * kTileLane; }

  // Row of pack `index` from the lane's first; one that does not exist is replaced by the first, so that loads need no
  // condition.
  static QK_DEVICE_MEMBER int down(int index, int reach) { return index < reach ? index * kSquareStep : 0; }

  // How many of the lane's packs lie in the matrix.
  QK_DEVICE_MEMBER int reach(const Item& item) const {
    const int64_t rows = item.n - n - row;
    if (lane_k() >= item.k - k || rows <= 0) return 0;
    return rows >= kRows ? packs : (static_cast<int>(rows) + kSquareStep - 1) / kSquareStep;
  }
};

template <int packs>
int64_t square_tiles(const Item& item) {
  constexpr int64_t kRows = packs * kSquareStep;
  return item.e * ((item.n + kRows - 1) / kRows) * ((item.k + kSquareColumns - 1) / kSquareColumns);
}

// Whether such tiles are well filled.
inline bool squarish(const Item& item) { return item.n >= 32 && item.k >= kSquareColumns / 2; }

// Multiplier by which a pack's number is divided by the packs of a row; exact as long as their product is under 2^32.
inline uint32_t row_magic(int64_t packs_a_row) {
  const uint64_t reach = static_cast<uint64_t>(packs_a_row) + kTileElements / kTileLane;
  if (packs_a_row < 2 || reach * static_cast<uint64_t>(packs_a_row) >= (uint64_t{1} << 32)) return 0;
  return static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(packs_a_row) + 1);
}

}  // namespace qk
