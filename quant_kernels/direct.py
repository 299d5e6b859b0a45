"""The short way for one whole weight: what `quantize` does when nothing but the format was asked for.

Small weights are many, and the general way costs more time than they do. Everything that the general way would refuse,
or that needs more than one native call, is left to it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quant_kernels.arguments import PLAIN_TYPES
from quant_kernels.job import new_job
from quant_kernels.library import native_on
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import LAYOUTS, ROUNDINGS, TARGETS, Target, TargetCode
from quant_spec import QuantKey, get_format

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SLOTS = [0, -1, -1, -1, 1, 2, -1, -1, -1]
_PLAIN = [0, 0, 0, 0]


@functools.lru_cache(maxsize=256)
def _recipe(name: str, rounding: str | None, dtype_code: int) -> tuple[Target, list[int], QuantKey] | None:
    if name not in TARGETS or TARGETS[name].code is TargetCode.NVFP4:
        return None
    job = new_job(get_format(name), rounding, fnuz=False, layout="row_major", through=torch.bfloat16)
    code = int(job.target.code)
    parameters = [code, ROUNDINGS[job.options.rounding], LAYOUTS["row_major"], 0, dtype_code, 0, 0]
    return job.target, parameters, job.key


def quantize_directly(weight: object, name: str, rounding: object) -> QuantizedTensor | None:
    """Quantize a weight [.., N, K] with one native call; None if the general way has to, or has to refuse it.

    Raises:
        KernelInputError: `rounding` does not fit the format.
    """
    if type(weight) not in PLAIN_TYPES or not (rounding is None or isinstance(rounding, str)):
        return None
    assert isinstance(weight, Tensor)  # noqa: S101  (for type checkers)
    code = _DTYPE_CODES.get(weight.dtype)
    if (
        code is None
        or weight.layout is not torch.strided
        or weight.is_nested
        or weight.is_neg()
        or not native_on(weight.device.type)
    ):
        return None
    recipe = _recipe(name, rounding, code)
    shape = tuple(weight.shape)
    if recipe is None or len(shape) not in (2, 3) or 0 in shape:
        return None
    target, parameters, key = recipe
    if shape[-1] % target.k_multiple:
        return None
    device = weight.device
    data = torch.empty(target.data_shape(shape), dtype=target.op_data_dtype, device=device)
    scale = torch.empty(target.scale_shape(shape), dtype=target.op_scale_dtype, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    torch.ops.quant_kernels._convert.default([weight, data, scale], _SLOTS, _PLAIN, parameters, stream)  # noqa: SLF001
    if target.default_rounding:
        data, scale = data.view(target.data_dtype), scale.view(target.scale_dtype)
    return QuantizedTensor(data, scale, key, shape)
