"""Runs one conversion over a list of weights: natively where the library serves the device, else in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from quant_kernels import reference
from quant_kernels.encodings import Encoded
from quant_kernels.library import native_on
from quant_kernels.reference.layouts import padded_scale_shape, shuffle_scale, shuffle_weight
from quant_kernels.targets import LAYOUTS, ROUNDINGS, Target, TargetCode, reference_quantize
from quant_kernels.traced import trace_amax, trace_dense, trace_quantize

if TYPE_CHECKING:
    from collections.abc import Sequence

Source: TypeAlias = Tensor | Encoded
"""A weight as it is (float32, float16, bfloat16) or quantized."""

_NO_ROW: Final = torch.iinfo(torch.int64).max
_DTYPE_CODES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class Options:
    """What holds for all weights of one call.

    Attributes:
        rounding: of power-of-two scales.
        layout: order of the stored bytes.
        fnuz: store float8_e4m3fnuz (PTPC).
        through: dtype that quantized sources are rounded to on their way.
    """

    rounding: str = "even"
    layout: str = "row_major"
    fnuz: bool = False
    through: torch.dtype = torch.bfloat16


@dataclass(slots=True)
class Outputs:
    """Tensors that one conversion reads beside the weight (`amax`) and writes.

    Attributes:
        data: codes; packed codes as bytes.
        scale: scales; E8M0 scales as bytes.
        second: NVFP4's second scales, fp32 [..].
        amax: greatest magnitudes to use instead of the weight's own.
        bad: int64 [2]: bad rows, groups or blocks, and the first bad row; counted if it is there.
        sums: float64 [`sum_slots`, 2], zeros: Σ w² and Σ (w − ŵ)² of each row, tile or run; summed if it is there.
    """

    data: Tensor | None = None
    scale: Tensor | None = None
    second: Tensor | None = None
    amax: Tensor | None = None
    bad: Tensor | None = None
    sums: Tensor | None = None


def source_shape(source: Source) -> tuple[int, ...]:
    """Return the shape of a source in elements."""
    return source.shape if isinstance(source, Encoded) else tuple(source.shape)


def source_device(source: Source) -> torch.device:
    """Return the device of a source."""
    return source.data.device if isinstance(source, Encoded) else source.device


def source_dtype(source: Source, through: torch.dtype) -> torch.dtype:
    """Return the dtype that a source's values have before they are converted."""
    return through if isinstance(source, Encoded) else source.dtype


def new_bad_counter(device: torch.device) -> Tensor:
    """Return a counter of bad values: nothing found yet."""
    return torch.tensor([0, _NO_ROW], dtype=torch.int64, device=device)


def sum_slots(shape: tuple[int, ...]) -> int:
    """Return how many partial sums a kernel may write for a weight: one a row, tile or run of 8,192."""
    matrices, (n, k) = math.prod(shape[:-2]), shape[-2:]
    return matrices * max(n, -(-n // 128) * -(-k // 128)) + -(-matrices * n * k // 8192)


def output_shapes(target: Target, shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of codes and scales of a weight [.., N, K]."""
    scale_shape = target.scale_shape(shape)
    if layout == "cdna" and target.default_rounding:
        scale_shape = (*scale_shape[:-2], *padded_scale_shape(*scale_shape[-2:]))
    return target.data_shape(shape), scale_shape


def run(items: Sequence[tuple[Source, Outputs]], target: Target, options: Options) -> None:
    """Convert every source into its outputs, in one launch where that can be. Arguments were checked before."""
    todo = []
    for source, outputs in items:
        if 0 in source_shape(source):
            _fill_empty(outputs)
        else:
            todo.append((source, outputs))
    if not todo:
        return
    if torch.compiler.is_compiling():
        for source, outputs in todo:
            trace_quantize(source, outputs, target, options)
        return
    device = source_device(todo[0][0])
    if target.code is TargetCode.NVFP4:
        todo = [_with_tensor_amax(source, outputs, options) for source, outputs in todo]
    if native_on(device.type):
        _run_native(todo, int(target.code), options, device)
    else:
        for source, outputs in todo:
            _run_plain(source, outputs, target, options)


def _fill_empty(outputs: Outputs) -> None:
    # A weight without elements still has scales if K = 0: those of zero rows.
    if outputs.scale is not None and outputs.scale.numel():
        outputs.scale.fill_(1)
    if outputs.second is not None:
        outputs.second.zero_()
    if outputs.sums is not None:
        outputs.sums.zero_()


def _with_tensor_amax(source: Source, outputs: Outputs, options: Options) -> tuple[Source, Outputs]:
    """Return the item with the greatest magnitude of each matrix, which NVFP4's second scale is made from."""
    if outputs.amax is not None:
        return source, outputs
    shape = source_shape(source)
    found = torch.empty(shape[:-2], device=source_device(source))
    run_amax(source, found, (shape[-2], shape[-1]), options.through)
    return source, Outputs(outputs.data, outputs.scale, outputs.second, found, outputs.bad, outputs.sums)


def run_amax(source: Source, out: Tensor, block: tuple[int, int], through: torch.dtype) -> None:
    """Write the greatest magnitude of each block of rows x columns of a source to `out` (fp32)."""
    device = source_device(source)
    lead = source_shape(source)[:-2]
    n, k = source_shape(source)[-2:]
    tiles = out.view(*lead, -(-n // block[0]), -(-k // block[1]))
    if torch.compiler.is_compiling() and not isinstance(source, Encoded):
        trace_amax(source, tiles, block)
    elif native_on(device.type):
        _run_native([(source, Outputs(scale=tiles))], int(TargetCode.AMAX), Options(through=through), device, block)
    else:
        tiles.copy_(reference.block_amax(decode(source, through), *block))


def run_dense(items: Sequence[tuple[Encoded, Tensor]], dtype: torch.dtype) -> None:
    """Dequantize sources into tensors of `dtype`, rounded once."""
    todo = [(source, out) for source, out in items if out.numel()]
    if not todo:
        return
    if torch.compiler.is_compiling():
        for source, out in todo:
            trace_dense(source, out)
        return
    device = todo[0][0].data.device
    if native_on(device.type):
        pairs = [(source, Outputs(data=out)) for source, out in todo]
        _run_native(pairs, int(TargetCode.DENSE), Options(through=dtype), device)
    else:
        for source, out in todo:
            out.copy_(decode(source, dtype))


def decode(source: Source, dtype: torch.dtype, *, checked: bool = False) -> Tensor:
    """Return the values of a source in plain torch; with `checked`, NaN where its scale is negative."""
    if not isinstance(source, Encoded):
        return source
    scale = source.scale
    if checked and scale.dtype is not torch.uint8:
        scale = torch.where(scale.float() < 0, torch.nan, scale.float())
    if source.second is not None:
        weight = reference.dequantize_nvfp4(source.data, scale, source.second, dtype)
    elif source.data.dtype is torch.uint8:
        weight = reference.dequantize_mxfp4(source.data, scale, None, dtype)
    else:
        weight = reference.dequantize_fp8_blocks(source.data, scale, dtype, block=source.block, offset=source.offset)
    return weight


def _run_plain(source: Source, outputs: Outputs, target: Target, options: Options) -> None:
    weight = decode(source, options.through, checked=outputs.bad is not None)
    data, scale, second = reference_quantize(weight, target, options.rounding, outputs.amax, fnuz=options.fnuz)
    if outputs.bad is not None:
        _count_bad(weight, target, outputs.bad)
    if outputs.sums is not None:
        _sum_errors(
            weight,
            Encoded(_op_view(data), _op_view(scale), second, _block(target, weight), (0, 0), tuple(weight.shape)),
            outputs.sums,
        )
    data, scale = _op_view(data), _op_view(scale)
    if options.layout == "cdna":
        data = shuffle_weight(data.view(torch.uint8)).view(data.dtype)
        scale = shuffle_scale(scale) if target.default_rounding else scale
    assert outputs.data is not None  # noqa: S101  (run() is called with both)
    assert outputs.scale is not None  # noqa: S101
    outputs.data.copy_(data)
    outputs.scale.copy_(scale)
    if outputs.second is not None and second is not None:
        outputs.second.copy_(second)


def _op_view(tensor: Tensor) -> Tensor:
    packed = tensor.dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    return tensor.view(torch.uint8) if packed else tensor


def _block(target: Target, weight: Tensor) -> tuple[int, int]:
    return target.block[0], target.block[1] or weight.shape[-1]


def _count_bad(weight: Tensor, target: Target, bad: Tensor) -> None:
    rows, cols = _block(target, weight)
    units = ~reference.block_amax(weight, rows, cols).isfinite()
    bad[0] += units.sum()
    bad_rows = (~weight.isfinite()).any(-1).flatten().nonzero()
    if bad_rows.numel():
        bad[1] = torch.minimum(bad[1], bad_rows[0, 0])


def _sum_errors(weight: Tensor, encoded: Encoded, sums: Tensor) -> None:
    error = weight.float() - decode(encoded, torch.float32)
    rows = weight.shape[:-1].numel()
    sums[:rows, 0] = weight.double().square().sum(-1).flatten()
    sums[:rows, 1] = error.double().square().sum(-1).flatten()


def _run_native(
    items: Sequence[tuple[Source, Outputs]],
    code: int,
    options: Options,
    device: torch.device,
    block: tuple[int, int] = (0, 0),
) -> None:
    """Hand tensors to the native operator: a flat list, and for each item the places of its tensors in that list."""
    tensors: list[Tensor] = []
    slots: list[int] = []
    geometry: list[int] = []
    for source, outputs in items:
        if isinstance(source, Encoded):
            read: tuple[Tensor | None, ...] = (source.data, source.scale, source.second)
            geometry += (*source.block, *source.offset)
        else:
            read = (source, None, None)
            geometry += (0, 0, 0, 0)
        roles = (*read, outputs.amax, outputs.data, outputs.scale, outputs.second, outputs.bad, outputs.sums)
        for tensor in roles:
            slots.append(-1 if tensor is None else len(tensors))
            if tensor is not None:
                tensors.append(tensor)
    parameters = [
        code,
        ROUNDINGS.get(options.rounding, 0),
        LAYOUTS[options.layout],
        int(options.fnuz),
        _DTYPE_CODES[options.through],
        *block,
    ]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    torch.ops.quant_kernels._convert(tensors, slots, geometry, parameters, stream)  # noqa: SLF001
