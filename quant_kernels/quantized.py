"""QuantizedTensor: the codes and scales of one weight, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quant_spec import QuantKey


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight [.., N, K].

    Attributes:
        data: codes. FP8: float8_e4m3fn (or float8_e4m3fnuz) [.., N, K]; 4-bit: float4_e2m1fn_x2 [.., N, K/2],
            element 2i in the low nibble.
        scale: PTPC fp32 [.., N, 1]; per block fp32 [.., ⌈N/128⌉, ⌈K/128⌉]; MX float8_e8m0fnu [.., N, K/32]; NVFP4
            float8_e4m3fn [.., N, K/16].
        key: the format.
        shape: shape of the weight, in elements.
        second_scale: NVFP4: fp32, one a matrix [..] (0-d for 2-D weights); None for other formats.
        error_sums: float64 [2], Σ w² and Σ (w − ŵ)² over the weight, if they were asked for.
    """

    data: Tensor
    scale: Tensor
    key: QuantKey
    shape: tuple[int, ...]
    second_scale: Tensor | None = None
    error_sums: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        second = 0 if self.second_scale is None else self.second_scale.nbytes
        return self.data.nbytes + self.scale.nbytes + second

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise ratio in dB, 10·log10(Σ w² / Σ (w − ŵ)²); None if the sums were not asked for.

        Reads the sums back from the device. Infinite for an exact result.
        """
        if self.error_sums is None:
            return None
        signal, noise = self.error_sums.double().cpu().unbind()
        return float(10 * torch.log10(signal / noise)) if noise else float("inf")
