"""CDNA tile orders, in numpy, by three descriptions that share nothing with the library's.

As AMD publishes them (a reshape and a transposition), as offsets of single bytes, and as what the lanes of a wave read:
for a product of 16 x 16 x 128 elements of 4 bits, lane l holds row l mod 16 of the weight, elements 32 (l div 16)
onwards, and the scale of just these.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import quant_kernels as qk

SHAPES = [(16, 64), (32, 256), (256, 512), (48, 448), (3, 64, 256), (2, 272, 704)]
FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")


def quantized(name: str, shape: tuple[int, ...], device: str) -> tuple[np.ndarray, ...]:
    """Bytes of codes and scales, row-major and in tile order."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    weight = (weight * torch.exp2(torch.arange(shape[-1]) % 37 - 18.0)).to(device, torch.bfloat16)
    plain, tiled = qk.quantize(weight, name), qk.quantize(weight, name, layout="cdna")
    parts = (plain.data, plain.scale, tiled.data, tiled.scale)
    return tuple(part.contiguous().view(torch.uint8).cpu().numpy() for part in parts)


def stored_tiles(codes: np.ndarray) -> np.ndarray:
    """Weight bytes as published: view (N/16, 16, B/32, 2, 16), axes in the order 0, 2, 3, 1, 4."""
    *lead, n, width = codes.shape
    tiles = codes.reshape(*lead, n // 16, 16, width // 32, 2, 16)
    return np.moveaxis(tiles, -4, -2).reshape(codes.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_stored_as_published(shape: tuple[int, ...], name: str, device: str) -> None:
    codes, _, tiled, _ = quantized(name, shape, device)
    assert np.array_equal(tiled, stored_tiles(codes))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_are_stored_as_published(shape: tuple[int, ...], name: str, device: str) -> None:
    """View (N/32, 2, 16, G/8, 2, 4), axes in the order 0, 3, 5, 2, 4, 1, after padding to 256 rows and 8 groups."""
    _, scale, _, tiled = quantized(name, shape, device)
    *lead, n, groups = scale.shape
    rows, columns = -n % 256, -groups % 8
    padded = np.pad(scale, [*[(0, 0)] * len(lead), (0, rows), (0, columns)], constant_values=127)
    assert tiled.shape == padded.shape
    for matrix, found in zip(padded.reshape(-1, *padded.shape[-2:]), tiled.reshape(-1, *tiled.shape[-2:]), strict=True):
        view = matrix.reshape((n + rows) // 32, 2, 16, (groups + columns) // 8, 2, 4)
        assert np.array_equal(found.reshape(-1), view.transpose(0, 3, 5, 2, 4, 1).reshape(-1))


@pytest.mark.parametrize("shape", [(32, 256), (2, 48, 512), (64, 1024)], ids=str)
def test_lanes_of_a_wave_read_their_operands(shape: tuple[int, ...], device: str) -> None:
    codes, scale, tiled, tiled_scale = quantized("mxfp4", shape, device)
    stack = (each.reshape(-1, *each.shape[-2:]) for each in (codes, scale, tiled, tiled_scale))
    for matrix, scales, memory, scale_memory in zip(*stack, strict=True):
        n, width = matrix.shape
        flat, flat_scale = memory.reshape(-1), scale_memory.reshape(-1)
        for row_tile in range(n // 16):
            for k_tile in range(width // 64):  # 128 elements
                base = row_tile * 16 * width + k_tile * 1024
                # One word of scales a lane serves 32 rows and 256 elements: its byte is picked by the instruction.
                words = (row_tile // 2) * 32 * scale_memory.shape[-1] + (k_tile // 2) * 256
                for lane in range(64):
                    row, group = row_tile * 16 + lane % 16, k_tile * 4 + lane // 16
                    read = flat[base + 16 * lane : base + 16 * lane + 16]
                    assert np.array_equal(read, matrix[row, 16 * group : 16 * group + 16])
                    picked = 2 * (k_tile % 2) + row_tile % 2
                    assert flat_scale[words + 4 * lane + picked] == scales[row, group]
