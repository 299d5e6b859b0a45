"""Converts all weights of a layer in one go, each given whole or in parts that lie anywhere in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor

from quant_kernels.conversion import dequantize, quantize
from quant_kernels.encodings import Encoded
from quant_kernels.job import Job, convert, new_job
from quant_kernels.launch import output_shapes, run_amax, run_dense, source_device, source_shape
from quant_kernels.loading.sources import Part
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS, TargetCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quant_kernels.loading.sources import WeightSource
    from quant_spec import QuantFormat

BLOCK: Final = 128
"""Rows and columns of a block of `per_block_fp8`."""


@attrs.frozen
class ConversionOptions:
    """What holds for every conversion of a job.

    Attributes:
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        check: raise on NaN and Inf.
        measure: sum up the error of each weight.
        fnuz: store float8_e4m3fnuz where the format has it.
        layout: `row_major` or `cdna`.
        through: dtype that quantized sources are rounded to on their way.
    """

    scale_rounding: str | None = None
    check: bool = True
    measure: bool = False
    fnuz: bool = False
    layout: str = "row_major"
    through: torch.dtype = torch.bfloat16

    def job(self, target: QuantFormat, dtype: torch.dtype) -> Job:
        """Return the conversion to a format that has kernels, for sources of `dtype`.

        Raises:
            KernelInputError: an option does not fit the format.
        """
        rounding = self.scale_rounding if target.scale_roundings else None
        fnuz = self.fnuz and TARGETS[target.name].code is TargetCode.PTPC_FP8
        return new_job(target, rounding, fnuz=fnuz, layout=self.layout, through=dtype)


@attrs.frozen(eq=False)
class WeightWork:
    """One weight to be converted.

    Attributes:
        name: what errors call it.
        shape: its shape [N, K] or [E, N, K], in elements.
        parts: its values.
        amax: fp32 greatest magnitudes to use instead of its own, in the shape of the scales (NVFP4: one a matrix).
        offset: row and column of its first element within the first block of scales, for a cut of a larger weight.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    amax: Tensor | None = None
    offset: tuple[int, int] = (0, 0)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return source_device(self.parts[0].source)

    def tiles(self) -> tuple[int, int]:
        """Return how many blocks of scales of `per_block_fp8` it overlaps, down and across."""
        rows, cols = (-(-(size + first) // BLOCK) for size, first in zip(self.shape[-2:], self.offset, strict=True))
        return rows, cols


def convert_weights(
    works: Sequence[WeightWork], target: QuantFormat, options: ConversionOptions
) -> list[QuantizedTensor]:
    """Convert the weights of a layer, in one launch for all that are stored alike.

    Raises:
        KernelInputError: a weight or an option does not fit the format.
        NonFiniteError: checked, and a weight holds NaN or Inf; its name is that of the part.
    """
    if not works:
        return []
    if target.name not in TARGETS:
        return [_by_reference(work, target, options) for work in works]
    ready = [_with_matrix_amax(_laid_out(work, target, options), target, options) for work in works]
    first = ready[0].parts[0].source
    if all(_is_simple(work, first) for work in ready):
        return convert(
            options.job(target, options.through if isinstance(first, Encoded) else first.dtype),
            [work.parts[0].source for work in ready],
            [work.parts[0].label for work in ready],
            check=options.check,
            out=None,
            amax=None,
            measure=options.measure,
        )
    results = [_allocated(work, target, options) for work in ready]
    groups: dict[tuple[torch.dtype | None, bool], list[tuple[int, Part]]] = {}
    for index, work in enumerate(ready):
        for part in work.parts:
            dtype = None if isinstance(part.source, Encoded) else part.source.dtype
            groups.setdefault((dtype, work.amax is not None), []).append((index, part))
    sums: dict[int, Tensor] = {}
    for (dtype, given), group in groups.items():
        done = convert(
            options.job(target, dtype or options.through),
            [part.source for _, part in group],
            [part.label for _, part in group],
            check=options.check,
            out=[_view(ready[index], part, results[index], target) for index, part in group],
            amax=[_amax_of(ready[index], part, target) for index, part in group] if given else None,
            measure=options.measure,
        )
        for (index, _), result in zip(group, done, strict=True):
            if result.error_sums is not None:
                sums[index] = sums[index] + result.error_sums if index in sums else result.error_sums
    return [_finished(result, sums.get(index)) for index, result in enumerate(results)]


def _is_simple(work: WeightWork, like: WeightSource) -> bool:
    """Tell whether a weight is one part as it stands, stored like another."""
    if len(work.parts) != 1 or work.amax is not None or any(work.offset):
        return False
    part = work.parts[0]
    if part.expert is not None:
        return False
    if isinstance(like, Encoded) or isinstance(part.source, Encoded):
        return isinstance(like, Encoded) and isinstance(part.source, Encoded)
    return part.source.dtype is like.dtype


def _finished(result: QuantizedTensor, sums: Tensor | None) -> QuantizedTensor:
    return QuantizedTensor(result.data, result.scale, result.key, result.shape, result.second_scale, sums)


def _by_reference(work: WeightWork, target: QuantFormat, options: ConversionOptions) -> QuantizedTensor:
    """Convert by the plain-torch function of a format without kernels."""
    dense = dense_weight(work, options.through)
    if options.check and not bool(dense.isfinite().all()):
        # ptpc_fp8's checked conversion names the rows; nothing of its result is used.
        quantize(dense, "ptpc_fp8", check=True, name=work.name)
    rounding = options.scale_rounding if target.scale_roundings else None
    return quantize(dense, target, scale_rounding=rounding, name=work.name)


def dense_weight(work: WeightWork, through: torch.dtype) -> Tensor:
    """Return a weight in one plain tensor: itself if it is plain and whole, else a new one."""
    first = work.parts[0].source
    if len(work.parts) == 1 and work.parts[0].expert is None and not isinstance(first, Encoded):
        return first
    dtypes = {through if isinstance(part.source, Encoded) else part.source.dtype for part in work.parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dense = torch.empty(work.shape, dtype=dtype, device=work.device)
    for part in work.parts:
        view = _select(dense, part.expert, part.rows, part.cols)
        if not isinstance(part.source, Encoded):
            view.copy_(part.source)
        elif dtype is through:
            run_dense([(part.source, view)], through)
        else:
            rounded = torch.empty(part.source.shape, dtype=through, device=work.device)
            run_dense([(part.source, rounded)], through)
            view.copy_(rounded)
    return dense


def _select(tensor: Tensor, expert: int | None, rows: slice, cols: slice) -> Tensor:
    return tensor[..., rows, cols] if expert is None else tensor[expert, rows, cols]


def _bounds(part: Part, work: WeightWork) -> tuple[int, int, int, int]:
    """Return first and last row and column (past the end) of a part."""
    first, past, _ = part.rows.indices(work.shape[-2])
    left, right, _ = part.cols.indices(work.shape[-1])
    return first, past, left, right


def _laid_out(work: WeightWork, target: QuantFormat, options: ConversionOptions) -> WeightWork:
    """Return a weight whose every part can be converted by itself."""
    if options.layout != "row_major" and len(work.parts) > 1:
        return attrs.evolve(work, parts=(Part(dense_weight(work, options.through), work.name),))
    if TARGETS[target.name].code is not TargetCode.PER_BLOCK_FP8:
        return work
    if any(work.offset):
        dense = dense_weight(work, options.through)
        return attrs.evolve(work, parts=tuple(_cut_at_blocks(work, dense)))
    if all(_on_blocks(part, work) for part in work.parts):
        return work
    return attrs.evolve(work, parts=(Part(dense_weight(work, options.through), work.name),))


def _on_blocks(part: Part, work: WeightWork) -> bool:
    first, past, _, _ = _bounds(part, work)
    return first % BLOCK == 0 and (past % BLOCK == 0 or past == work.shape[-2]) and part.rows.step in (None, 1)


def _cut_at_blocks(work: WeightWork, dense: Tensor) -> Iterator[Part]:
    """Yield the pieces of a weight that starts within a block: each starts on a block of its own."""
    (n, k), (top, left) = work.shape[-2:], work.offset
    down = [slice(0, min(n, BLOCK - top)), slice(min(n, BLOCK - top), n)]
    across = [slice(0, min(k, BLOCK - left)), slice(min(k, BLOCK - left), k)]
    for rows in down:
        for cols in across:
            if rows.start < rows.stop and cols.start < cols.stop:
                yield Part(dense[..., rows, cols], work.name, rows=rows, cols=cols)


def _with_matrix_amax(work: WeightWork, target: QuantFormat, options: ConversionOptions) -> WeightWork:
    """Return a weight in parts with the greatest magnitude of each matrix, where scales are made from that (NVFP4)."""
    if work.amax is not None or len(work.parts) == 1 or TARGETS[target.name].code is not TargetCode.NVFP4:
        return work
    return attrs.evolve(work, amax=matrix_amax(work, options))


def matrix_amax(work: WeightWork, options: ConversionOptions) -> Tensor:
    """Return the greatest magnitude of each matrix of a weight: fp32 [..], NaN where a NaN is."""
    found = torch.zeros(work.shape[:-2], device=work.device)
    for part in work.parts:
        shape = source_shape(part.source)
        own = torch.empty(shape[:-2], device=work.device)
        run_amax(part.source, own, (shape[-2], shape[-1]), options.through)
        view = found if part.expert is None else found[part.expert]
        view.copy_(torch.maximum(view, own))
    return found


def _allocated(work: WeightWork, target: QuantFormat, options: ConversionOptions) -> QuantizedTensor:
    job = options.job(target, options.through)
    data_shape, scale_shape = output_shapes(job.target, work.shape, options.layout)
    if any(work.offset):
        scale_shape = (*work.shape[:-2], *work.tiles())
    device = work.device
    second = torch.empty(work.shape[:-2], dtype=torch.float32, device=device) if target.weight.second_scale else None
    data = torch.empty(data_shape, dtype=job.data_dtype, device=device)
    scale = torch.empty(scale_shape, dtype=job.target.scale_dtype, device=device)
    return QuantizedTensor(data, scale, job.key, work.shape, second)


def _view(work: WeightWork, part: Part, whole: QuantizedTensor, target: QuantFormat) -> QuantizedTensor:
    """Return the tensors that a part is written into."""
    if len(work.parts) == 1 and part.expert is None:
        return whole
    rows, cols = _scale_slices(work, part, target)
    per_byte = TARGETS[target.name].per_byte
    _, _, left, right = _bounds(part, work)
    data = _select(whole.data, part.expert, part.rows, slice(left // per_byte, right // per_byte))
    scale = _select(whole.scale, part.expert, rows, cols)
    second = whole.second_scale
    if second is not None and part.expert is not None:
        second = second[part.expert]
    return QuantizedTensor(data, scale, whole.key, source_shape(part.source), second)


def _scale_slices(work: WeightWork, part: Part, target: QuantFormat) -> tuple[slice, slice]:
    """Return which scales belong to a part."""
    rows, cols = TARGETS[target.name].block
    first, past, left, right = _bounds(part, work)
    if rows == 1:
        width = cols or work.shape[-1]
        return part.rows, slice(left // width, -(-right // width)) if cols else slice(None)
    top, edge = work.offset
    return (
        slice((first + top) // rows, -(-(past + top) // rows)),
        slice((left + edge) // cols, -(-(right + edge) // cols)),
    )


def _amax_of(work: WeightWork, part: Part, target: QuantFormat) -> Tensor:
    """Return the given greatest magnitudes that belong to a part."""
    assert work.amax is not None  # noqa: S101  (the caller has sorted the parts by this)
    if TARGETS[target.name].code is TargetCode.NVFP4:
        return work.amax if part.expert is None else work.amax[part.expert]
    return _select(work.amax, part.expert, *_scale_slices(work, part, target)).contiguous()


def decoded(result: QuantizedTensor, dtype: torch.dtype, offset: tuple[int, int] = (0, 0)) -> Tensor:
    """Return the values of a converted weight, rounded to `dtype`."""
    return dequantize(result, dtype, offset=offset)
