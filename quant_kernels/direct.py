"""The short way for one whole weight: what `quantize` does when nothing but the format was asked for.

Small weights are many, and the general way costs more time than they do. Everything that the general way would refuse,
or that needs more than one native call, is left to it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from quant_kernels.arguments import PLAIN_TYPES
from quant_kernels.checks import WEIGHT_DTYPES
from quant_kernels.job import new_job
from quant_kernels.library import native_on
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import ROUNDINGS, TARGETS, TargetCode
from quant_spec import get_format

if TYPE_CHECKING:
    from quant_spec import QuantKey

_RANKS: Final = (2, 3)


class _Recipe(NamedTuple):
    """What a format and a rounding come to: numbers of native code, and what the results are seen as."""

    code: int
    rounding: int
    k_multiple: int
    key: QuantKey
    views: tuple[torch.dtype, torch.dtype] | None


@functools.lru_cache(maxsize=256)
def _recipe(name: str, rounding: str | None) -> _Recipe | None:
    target = TARGETS.get(name)
    if target is None or target.code is TargetCode.NVFP4:
        return None
    job = new_job(get_format(name), rounding, fnuz=False, layout="row_major", through=torch.bfloat16)
    views = (target.data_dtype, target.scale_dtype) if target.default_rounding else None
    return _Recipe(int(target.code), ROUNDINGS[job.options.rounding], target.k_multiple, job.key, views)


def quantize_directly(weight: object, name: str, rounding: object) -> QuantizedTensor | None:
    """Quantize a weight [.., N, K] with one native call; None if the general way has to, or has to refuse it.

    Raises:
        KernelInputError: `rounding` does not fit the format.
    """
    if type(weight) not in PLAIN_TYPES or not (rounding is None or isinstance(rounding, str)):
        return None
    assert isinstance(weight, Tensor)  # noqa: S101  (for type checkers)
    recipe = _recipe(name, rounding)
    if recipe is None or weight.dtype not in WEIGHT_DTYPES or weight.layout is not torch.strided or weight.is_nested:
        return None
    shape = weight.shape
    if len(shape) not in _RANKS or 0 in shape or shape[-1] % recipe.k_multiple or weight.is_neg():
        return None
    stream = 0
    if weight.is_cuda:
        stream = torch.cuda.current_stream(weight.device).cuda_stream
    if not native_on("cpu" if weight.is_cpu else weight.device.type):
        return None
    plain = weight.detach() if weight.requires_grad else weight
    data, scale = _operator()(plain, recipe.code, recipe.rounding, stream)
    if recipe.views is not None:
        data, scale = data.view(recipe.views[0]), scale.view(recipe.views[1])
    return QuantizedTensor(data, scale, recipe.key, tuple(shape))


@functools.cache
def _operator() -> torch._ops.OpOverload:
    return torch.ops.quant_kernels._quantize_whole.default  # noqa: SLF001
