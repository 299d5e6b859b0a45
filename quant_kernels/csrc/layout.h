// Where a code or scale is stored in the tile orders of AMD's CDNA matrix kernels.
#pragma once

#include "portability.h"

namespace qk {

// Offset of byte (row, column) of a [n, width] matrix of codes in CDNA order: tiles of 16 rows x 32 bytes, each two
// halves of 16 bytes stored row by row. `width` is the bytes of a row.
QK_FN int64_t cdna_weight_offset(int64_t row, int64_t column, int64_t width) {
  return (row / 16) * 16 * width + (column / 32) * 512 + (column % 32) / 16 * 256 + (row % 16) * 16 + column % 16;
}

// Offset of scale (row, group) of a padded [.., width] matrix of E8M0 scales in CDNA order: tiles of 32 rows x 8 groups.
QK_FN int64_t cdna_scale_offset(int64_t row, int64_t group, int64_t width) {
  return (row / 32) * 32 * width + (group / 8) * 256 + (group % 4) * 64 + (row % 16) * 4 + (group % 8) / 4 * 2 +
         (row % 32) / 16;
}

}  // namespace qk
