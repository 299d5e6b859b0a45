"""Targets of the kernels: storage of each format that they write, and the numbers by which native code knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

import torch

from quant_kernels import reference
from quant_kernels.checks import check_k


class TargetCode(enum.IntEnum):
    """What a conversion writes; the same numbers as `enum Target` of csrc/job.h."""

    DENSE = 0
    PTPC_FP8 = 1
    MXFP4 = 2
    MXFP8 = 3
    PER_BLOCK_FP8 = 4
    NVFP4 = 5
    AMAX = 6


ROUNDINGS: Final = {"even": 0, "floor": 1, "rceil": 2}
"""Ways to round a power-of-two scale; the same numbers as `enum Rounding` of csrc/job.h."""

LAYOUTS: Final = {"row_major": 0, "cdna": 1}
"""Orders of the stored bytes; the same numbers as `enum Layout` of csrc/job.h."""


@dataclass(frozen=True)
class Target:
    """Storage of one format, and its plain-torch conversion.

    Attributes:
        name: name of the format.
        code: number of the format in native code.
        data_dtype: public dtype of the codes.
        scale_dtype: public dtype of the scales.
        block: rows and columns that share a scale; 0 stands for the whole side.
        per_byte: elements in one byte.
        default_rounding: of power-of-two scales; empty if scales are not powers of two.
        k_multiple: the input side must be a multiple of this.
        op_data_dtype: dtype of the codes at operator level: packed codes are bytes there.
        op_scale_dtype: dtype of the scales at operator level: E8M0 scales are bytes there.
        data_dtypes: dtypes that a destination of codes may have.
        scale_dtypes: dtypes that a destination of scales may have.
    """

    name: str
    code: TargetCode
    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    block: tuple[int, int]
    per_byte: int = 1
    default_rounding: str = ""
    k_multiple: int = 1
    op_data_dtype: torch.dtype = field(init=False)
    op_scale_dtype: torch.dtype = field(init=False)
    data_dtypes: tuple[torch.dtype, ...] = field(init=False)
    scale_dtypes: tuple[torch.dtype, ...] = field(init=False)

    def check_k(self, argument: str, k: int) -> None:
        """Refuse an input side that cannot be stored.

        Raises:
            KernelInputError: K is not a multiple of the scale group.
        """
        check_k(argument, k, self.k_multiple, self.name)

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a weight [.., N, K]."""
        return (*shape[:-1], shape[-1] // self.per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [.., N, K]."""
        rows, cols = self.block
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols) if cols else 1)

    def amax_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of given greatest magnitudes: the scales', or one a matrix [..] for NVFP4."""
        return shape[:-2] if self.code is TargetCode.NVFP4 else self.scale_shape(shape)

    def __post_init__(self) -> None:
        """Derive the dtypes at operator level, once: they are asked for with every small weight."""
        data = torch.uint8 if self.per_byte > 1 else self.data_dtype
        scale = torch.uint8 if self.default_rounding else self.scale_dtype
        object.__setattr__(self, "op_data_dtype", data)
        object.__setattr__(self, "op_scale_dtype", scale)
        object.__setattr__(self, "data_dtypes", tuple(dict.fromkeys((self.data_dtype, data))))
        object.__setattr__(self, "scale_dtypes", tuple(dict.fromkeys((self.scale_dtype, scale))))


_E4M3, _E2M1, _E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu

TARGETS: Final = {
    target.name: target
    for target in (
        Target("ptpc_fp8", TargetCode.PTPC_FP8, _E4M3, torch.float32, (1, 0)),
        Target("mxfp4", TargetCode.MXFP4, _E2M1, _E8M0, (1, 32), 2, "even", 32),
        Target("mxfp8", TargetCode.MXFP8, _E4M3, _E8M0, (1, 32), 1, "rceil", 32),
        Target("per_block_fp8", TargetCode.PER_BLOCK_FP8, _E4M3, torch.float32, (128, 128)),
        Target("nvfp4", TargetCode.NVFP4, _E2M1, _E4M3, (1, 16), 2, k_multiple=16),
    )
}
"""Formats that the kernels write, by name."""


def reference_quantize(
    weight: torch.Tensor, target: Target, rounding: str, amax: torch.Tensor | None, *, fnuz: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize in plain torch: codes, scales and second scale of `target` in their public dtypes."""
    match target.code:
        case TargetCode.PTPC_FP8:
            return reference.quantize_ptpc_fp8(weight, amax=amax, fnuz=fnuz)
        case TargetCode.MXFP4:
            return reference.quantize_mxfp4(weight, rounding, amax=amax)
        case TargetCode.MXFP8:
            return reference.quantize_mxfp8(weight, rounding, amax=amax)
        case TargetCode.PER_BLOCK_FP8:
            return reference.quantize_per_block_fp8(weight, amax=amax)
        case _:
            return reference.quantize_nvfp4(weight, amax=amax)
