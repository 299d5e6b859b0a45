"""Activations quantized at run time: the words that a layer's activation may be, and the values that a product uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.checks import KernelInputError, check_choice
from quant_kernels.encodings import Encoded
from quant_kernels.launch import Options, Outputs, output_shapes, run, run_dense
from quant_kernels.targets import TARGETS
from quant_spec.dtypes import FP8_E4M3
from quant_spec.granularity import PerGroup, PerTensor, PerToken

if TYPE_CHECKING:
    from quant_spec import QuantKey

PER_TOKEN: Final = "fp8_e4m3/per_token:dynamic"  # noqa: S105  (a token of text)
PER_TENSOR: Final = "fp8_e4m3/per_tensor:dynamic"
GROUP_128: Final = "fp8_e4m3/group_128:dynamic"
MXFP8: Final = "mxfp8:dynamic"
MXFP4: Final = "mxfp4:dynamic"
NVFP4: Final = "nvfp4:dynamic"
ACTIVATIONS: Final = (PER_TOKEN, PER_TENSOR, GROUP_128, MXFP8, MXFP4, NVFP4)
"""What an activation may be, in the words of the documents."""

# The last group of 128 may be shorter, as the last block of a per-block weight may be.
_GROUPS: Final = {PER_TOKEN: 1, PER_TENSOR: 1, GROUP_128: 1, MXFP8: 32, MXFP4: 32, NVFP4: 16}


def activation_word(key: QuantKey | None) -> str:
    """Return the word of `ACTIVATIONS` for a layer's activation; an empty text for none.

    Compares parts, so that a compiled graph can trace it.

    Raises:
        KernelInputError: it is not scaled at run time, or no product uses such an activation.
    """
    if key is None:
        return ""
    granularity = key.scale.granularity
    fp8 = key.element.name == FP8_E4M3.name
    word = ""
    if key.second_scale is not None:
        word = NVFP4 if key.element.name == "fp4_e2m1" else ""
    elif isinstance(granularity, PerGroup) and granularity.group_size == 32:  # noqa: PLR2004  (the group of MX formats)
        word = MXFP8 if fp8 else (MXFP4 if key.element.name == "fp4_e2m1" else "")
    elif isinstance(granularity, PerGroup) and granularity.group_size == 128:  # noqa: PLR2004  (DeepSeek-V3's group)
        word = GROUP_128 if fp8 else ""
    elif fp8 and isinstance(granularity, PerToken):
        word = PER_TOKEN
    elif fp8 and isinstance(granularity, PerTensor):
        word = PER_TENSOR
    if not word or key.scale.dynamic is not True:
        raise KernelInputError("activation", repr(str(key)), f"None, {', '.join(ACTIVATIONS)}")
    return word


def check_activation(word: str, k: int) -> None:
    """Refuse an activation that is unknown, or that cannot be cut into its groups.

    Raises:
        KernelInputError: it is, or K is not a multiple of the group.
    """
    if not word:
        return
    check_choice("activation", word, ACTIVATIONS)
    if k % _GROUPS[word]:
        raise KernelInputError("activation", f"{word} for K = {k}", f"K a multiple of {_GROUPS[word]}")


def round_activation(x: Tensor, word: str) -> Tensor:
    """Return the values of an activation after it was quantized, in its dtype.

    Args:
        x: float32, float16 or bfloat16 [M, K]; scales are made from these values.
        word: one of `ACTIVATIONS`; an empty text returns `x`. MXFP4 rounds its scales by `even`, MXFP8 by `rceil`, as
            weights do.

    Returns:
        code x scale in fp32, rounded once to the dtype of `x`, [M, K].
    """
    if not word or not x.numel():
        return x
    x = x.contiguous()
    if word == GROUP_128:
        columns = x.shape[1]
        whole = torch.nn.functional.pad(x, (0, -columns % 128))  # zeros do not change a scale
        rounded = _round(whole.view(-1, 128), "ptpc_fp8").view(whole.shape)
        return rounded[:, :columns].contiguous()
    if word == PER_TENSOR:
        greatest = x.abs().amax().float().expand(x.shape[0], 1).contiguous()
        return _round(x, "ptpc_fp8", greatest)
    return _round(x, "ptpc_fp8" if word == PER_TOKEN else word.partition(":")[0])


def _round(x: Tensor, name: str, amax: Tensor | None = None) -> Tensor:
    """Quantize a matrix to a format and back."""
    target = TARGETS[name]
    shape = (x.shape[0], x.shape[1])
    data_shape, scale_shape = output_shapes(target, shape, "row_major")
    data = torch.empty(data_shape, dtype=target.op_data_dtype, device=x.device)
    scale = torch.empty(scale_shape, dtype=target.op_scale_dtype, device=x.device)
    second = torch.empty((), device=x.device) if name == "nvfp4" else None
    options = Options(target.default_rounding or "even", through=x.dtype)
    run([(x, Outputs(data, scale, second, amax))], target, options)
    rounded = torch.empty_like(x)
    block = (target.block[0], target.block[1] or shape[1])
    run_dense([(Encoded(data, scale, second, block, (0, 0), shape), rounded)], x.dtype)
    return rounded
