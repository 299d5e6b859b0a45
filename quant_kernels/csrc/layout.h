// Where a code or scale is stored in the tile orders of AMD's CDNA matrix kernels.
#pragma once

#include "portability.h"

namespace qk {

// Offset of byte (row, column) of a [n, width] matrix of codes in CDNA order: tiles of 16 rows x 32 bytes, each two
// halves of 16 bytes stored row by row. `width` is the bytes of a row.
QK_FN int64_t cdna_weight_offset(int64_t row, int64_t column, int64_t width) {
  const uint64_t n = static_cast<uint64_t>(row), k = static_cast<uint64_t>(column);  // unsigned: bit fields, no divisions
  return static_cast<int64_t>((n & ~uint64_t{15}) * static_cast<uint64_t>(width) + ((k & ~uint64_t{31}) << 4) +
                              ((k & 16) << 4) + ((n & 15) << 4) + (k & 15));
}

// The same within 32 bits, for a place in the first rows of a matrix whose rows are less than 2^22 bytes.
QK_FN int cdna_lane_offset(int row, int column, int width) {
  return (row & ~15) * width + ((column & ~31) << 4) + ((column & 16) << 4) + ((row & 15) << 4) + (column & 15);
}

// Offset of scale (row, group) of a padded [.., width] matrix of E8M0 scales in CDNA order: tiles of 32 rows x 8 groups.
QK_FN int64_t cdna_scale_offset(int64_t row, int64_t group, int64_t width) {
  const uint64_t n = static_cast<uint64_t>(row), k = static_cast<uint64_t>(group);
  return static_cast<int64_t>((n & ~uint64_t{31}) * static_cast<uint64_t>(width) + ((k & ~uint64_t{7}) << 5) +
                              ((k & 3) << 6) + ((n & 15) << 2) + ((k & 4) >> 1) + ((n & 16) >> 4));
}

}  // namespace qk
