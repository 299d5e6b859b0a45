"""The short way for one whole weight: what `quantize` and `dequantize` do when nothing but a format or dtype was asked.

Small weights are many, and the general way costs more time than they do. Everything that the general way would refuse,
or that needs more than one native call, is left to it.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quant_kernels.arguments import PLAIN_TYPES
from quant_kernels.checks import WEIGHT_DTYPES
from quant_kernels.job import new_job
from quant_kernels.library import native_on
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import ROUNDINGS, TARGETS, TargetCode
from quant_spec import QuantKey, get_format
from quant_spec.dtypes import E8M0
from quant_spec.granularity import PerBlock, PerChannel, PerGroup

_RANKS: Final = (2, 3)
_FP4: Final = (torch.float4_e2m1fn_x2, torch.uint8)
_E8M0: Final = (torch.float8_e8m0fnu, torch.uint8)
_FP4_BLOCKS: Final = ((1, 16), (1, 32))


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


class _Stored(NamedTuple):
    """How the codes and scales of a format are read: rows and columns of a block (0: the whole side), bytes or not."""

    rows: int
    cols: int
    per_byte: int
    bytes_of_data: bool
    bytes_of_scale: bool


@functools.lru_cache(maxsize=256)
def _stored(key: QuantKey, data: torch.dtype, scale: torch.dtype) -> _Stored | None:
    """Return how a format is stored if its scales lie as kernels read them; None if the general way sees to that."""
    granularity, fp4 = key.scale.granularity, key.element.name == "fp4_e2m1"
    if isinstance(granularity, PerChannel):
        rows, cols = 1, 0
    elif isinstance(granularity, PerGroup):
        rows, cols = 1, granularity.group_size
    elif isinstance(granularity, PerBlock):
        rows, cols = granularity.rows, granularity.cols
    else:
        return None
    dtypes = {"fp4_e2m1": _FP4, "fp8_e4m3": (torch.float8_e4m3fn,), "fp8_e4m3fnuz": (torch.float8_e4m3fnuz,)}
    scales = _E8M0 if key.scale.dtype is E8M0 else (torch.float8_e4m3fn if key.second_scale else torch.float32,)
    if data not in dtypes.get(key.element.name, ()) or scale not in scales or (fp4 and (rows, cols) not in _FP4_BLOCKS):
        return None
    return _Stored(rows, cols, 2 if fp4 else 1, data is torch.float4_e2m1fn_x2, scale is torch.float8_e8m0fnu)


def dequantize_directly(q: QuantizedTensor, dtype: torch.dtype) -> Tensor | None:
    """Dequantize a weight with one native call; None if the general way has to, or has to refuse it.

    Args:
        q: a quantized weight, of which nothing was checked but that it is one.
        dtype: float32, float16 or bfloat16.
    """
    data, scale, second = q.data, q.scale, q.second_scale
    if not (_plain(data) and _plain(scale) and (second is None or _plain(second)) and isinstance(q.key, QuantKey)):
        return None
    stored = _stored(q.key, data.dtype, scale.dtype)
    if stored is None or data.device != scale.device or not native_on("cpu" if data.is_cpu else data.device.type):
        return None
    *lead, n, width = data.shape
    k = width * stored.per_byte
    tiles = (-(-n // stored.rows), -(-k // stored.cols) if stored.cols else 1)
    fits = _is_shape(q.shape) and q.shape == (*lead, n, k) and scale.shape == (*lead, *tiles) and len(lead) <= 1
    if not fits or 0 in data.shape or (second is None) == (q.key.second_scale is not None):
        return None
    if second is not None and not (
        second.shape == (*lead,) and second.dtype is torch.float32 and second.device == data.device
    ):
        return None
    stream = torch.cuda.current_stream(data.device).cuda_stream if data.is_cuda else 0
    codes = data.view(torch.uint8) if stored.bytes_of_data else data
    scales = scale.view(torch.uint8) if stored.bytes_of_scale else scale
    cols = stored.cols or k
    dense: Tensor = _dequantizer()(codes, scales, second, stored.rows, cols, WEIGHT_DTYPES.index(dtype), stream)
    return dense


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _plain(tensor: object) -> bool:
    """Tell whether a value is a contiguous tensor of plain memory that autograd does not follow."""
    if type(tensor) not in PLAIN_TYPES:
        return False
    assert isinstance(tensor, Tensor)  # noqa: S101  (for type checkers)
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return (
        strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and tensor.dim() <= _RANKS[-1]
    )


@functools.cache
def _operator() -> torch._ops.OpOverload:
    return torch.ops.quant_kernels._quantize_whole.default  # noqa: SLF001


@functools.cache
def _dequantizer() -> torch._ops.OpOverload:
    return torch.ops.quant_kernels._dequantize_whole.default  # noqa: SLF001
