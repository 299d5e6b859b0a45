"""Byte orders that AMD's CDNA matrix kernels read: 16 x 32-byte weight tiles and 32 x 8 scale tiles."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

WEIGHT_TILE: Final = (16, 32)
"""Rows and bytes of a weight tile; a tile is two halves of 16 bytes, each stored row by row."""
SCALE_TILE: Final = (32, 8)
"""Rows and scales of an E8M0 scale tile."""
SCALE_PADDING: Final = (256, 8)
"""Scales are padded to a multiple of these rows and columns before they are put in order."""


def shuffle_weight(data: Tensor) -> Tensor:
    """Put bytes [.., N, B] (N a multiple of 16, B of 32) in CDNA order: same shape, tiles one after the other.

    Within the tile of rows 16i … and bytes 32j …, byte (r, b) goes to 256·⌊b/16⌋ + 16·r + b mod 16.
    """
    rows, width = WEIGHT_TILE
    n, b = data.shape[-2:]
    tiles = data.reshape(-1, n // rows, rows, b // width, 2, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(data.shape)


def shuffle_scale(scale: Tensor) -> Tensor:
    """Put E8M0 bytes [.., N, G] in CDNA order: [.., ⌈N/256⌉·256, ⌈G/8⌉·8], padding 127 (2^0).

    Within the tile of rows 32i … and groups 8j …, scale (r, g) goes to 64·(g mod 4) + 4·(r mod 16) + 2·⌊g/4⌋ + ⌊r/16⌋.
    """
    n, groups = scale.shape[-2:]
    padded_n, padded_groups = padded_scale_shape(n, groups)
    padded = torch.nn.functional.pad(scale, (0, padded_groups - groups, 0, padded_n - n), value=127)
    tiles = padded.reshape(-1, padded_n // 32, 2, 16, padded_groups // 8, 2, 4)
    return tiles.permute(0, 1, 4, 6, 3, 5, 2).reshape(*scale.shape[:-2], padded_n, padded_groups)


def padded_scale_shape(n: int, groups: int) -> tuple[int, int]:
    """Return the rows and groups of scales in CDNA order."""
    rows, cols = SCALE_PADDING
    return -(-n // rows) * rows, -(-groups // cols) * cols
