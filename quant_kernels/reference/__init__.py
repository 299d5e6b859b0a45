"""Every conversion in plain torch: the oracle of the kernels, and what runs when no compiled library is there."""

from __future__ import annotations

from quant_kernels.reference.groups import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    group_amax,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    tensor_amax,
)
from quant_kernels.reference.rows_and_blocks import (
    block_amax,
    dequantize_fp8_blocks,
    dequantize_per_block_fp8,
    dequantize_ptpc_fp8,
    quantize_per_block_fp8,
    quantize_ptpc_fp8,
    row_amax,
)

__all__ = [
    "block_amax",
    "dequantize_fp8_blocks",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_per_block_fp8",
    "dequantize_ptpc_fp8",
    "group_amax",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_per_block_fp8",
    "quantize_ptpc_fp8",
    "row_amax",
    "tensor_amax",
]
