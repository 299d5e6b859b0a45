"""One call of a conversion: its outputs are allocated or checked, the kernels run, bad values are raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from quant_kernels.checks import (
    KernelInputError,
    NonFiniteError,
    check_choice,
    check_device,
    check_disjoint,
    check_dtype,
    check_k,
    check_output,
    check_scale_rounding,
    check_shape,
)
from quant_kernels.encodings import Encoded
from quant_kernels.launch import (
    Options,
    Outputs,
    Source,
    decode,
    new_bad_counter,
    output_shapes,
    run,
    source_device,
    source_shape,
    sum_slots,
)
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import LAYOUTS, TARGETS, Target, TargetCode
from quant_spec.dtypes import FP8_E4M3FNUZ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant_spec import QuantFormat, QuantKey

_LISTED_ROWS = 5
_UNITS = {"ptpc_fp8": "rows", "per_block_fp8": "blocks"}


@dataclass(frozen=True)
class Job:
    """A target with its options: what is the same for all weights of a call."""

    target: Target
    options: Options
    key: QuantKey

    @property
    def data_dtype(self) -> torch.dtype:
        """Public dtype of the codes."""
        return torch.float8_e4m3fnuz if self.options.fnuz else self.target.data_dtype

    @property
    def op_data_dtype(self) -> torch.dtype:
        """Dtype of the codes at operator level."""
        return torch.float8_e4m3fnuz if self.options.fnuz else self.target.op_data_dtype

    @property
    def data_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a destination of codes may have."""
        return (torch.float8_e4m3fnuz,) if self.options.fnuz else self.target.data_dtypes


def new_job(
    quant_format: QuantFormat, scale_rounding: str | None, *, fnuz: bool, layout: str, through: torch.dtype
) -> Job:
    """Return the job of a format that has kernels.

    Raises:
        KernelInputError: an option does not fit the format.
    """
    target = TARGETS[quant_format.name]
    if scale_rounding is not None:
        check_scale_rounding(scale_rounding, quant_format)
    check_choice("layout", layout, tuple(LAYOUTS))
    if fnuz and target.code is not TargetCode.PTPC_FP8:
        raise KernelInputError("fnuz", "True", f"False for {target.name}; only ptpc_fp8 has an FNUZ variant")
    key = attrs.evolve(quant_format.weight, element=FP8_E4M3FNUZ) if fnuz else quant_format.weight
    rounding = scale_rounding or target.default_rounding or "even"
    return Job(target, Options(rounding, layout, fnuz, through), key)


def convert(
    job: Job,
    sources: Sequence[Source],
    names: Sequence[str],
    *,
    check: bool,
    out: Sequence[QuantizedTensor] | None,
    amax: Sequence[Tensor] | None,
    measure: bool,
) -> list[QuantizedTensor]:
    """Convert sources of one kind, after every argument was checked.

    Raises:
        KernelInputError: an argument does not fit; nothing was written.
        NonFiniteError: `check` found NaN, Inf or a bad scale.
    """
    items: list[tuple[Source, Outputs]] = []
    results: list[QuantizedTensor] = []
    for argument, given in (("out", out), ("amax", amax)):
        if given is not None and len(given) != len(sources):
            raise KernelInputError(argument, f"{len(given)} entries", f"{len(sources)}, one a weight")
    for index, source in enumerate(sources):
        shape = source_shape(source)
        _check_source(job, shape, names[index])
        given_amax = None if amax is None else _checked_amax(job.target, source, amax[index])
        if out is None:
            outputs = _new_outputs(job, source, given_amax)
        else:
            outputs = _given_outputs(job, source, given_amax, out[index])
        if check or measure:
            outputs = _with_counters(outputs, source, check=check, measure=measure)
        items.append((source, outputs))
        results.append(_result(job, outputs, shape, None if out is None else out[index]))
    if check and source_device(sources[0]).type == "meta":
        raise KernelInputError("check", "True", "False for a weight on meta, which has no values")
    run(items, job.target, job.options)
    if check:
        _raise_bad(job, items, names)
    if measure:
        results = [_with_error_sums(result, outputs) for result, (_, outputs) in zip(results, items, strict=True)]
    return results


def _with_error_sums(result: QuantizedTensor, outputs: Outputs) -> QuantizedTensor:
    """Return the result with its error sums added up over the rows."""
    assert outputs.sums is not None  # noqa: S101  (asked for by the caller)
    return QuantizedTensor(
        result.data, result.scale, result.key, result.shape, result.second_scale, outputs.sums.sum(0)
    )


def _check_source(job: Job, shape: tuple[int, ...], name: str) -> None:
    job.target.check_k(name, shape[-1])
    if job.options.layout == "cdna":
        check_k(name, shape[-1] // job.target.per_byte, 32, "the cdna layout, in bytes a row")
        if shape[-2] % 16:
            raise KernelInputError(name, f"N = {shape[-2]}", "a multiple of 16 for the cdna layout")


def _checked_amax(target: Target, source: Source, amax: Tensor) -> Tensor:
    check_device("amax", amax, source_device(source))
    check_dtype("amax", amax, (torch.float32,))
    check_shape("amax", amax, target.amax_shape(source_shape(source)))
    return amax


def _new_outputs(job: Job, source: Source, amax: Tensor | None) -> Outputs:
    shape, device = source_shape(source), source_device(source)
    data_shape, scale_shape = output_shapes(job.target, shape, job.options.layout)
    second = torch.empty(shape[:-2], device=device) if job.target.code is TargetCode.NVFP4 else None
    return Outputs(
        torch.empty(data_shape, dtype=job.op_data_dtype, device=device),
        torch.empty(scale_shape, dtype=job.target.op_scale_dtype, device=device),
        second,
        amax,
    )


def _given_outputs(job: Job, source: Source, amax: Tensor | None, out: QuantizedTensor) -> Outputs:
    shape, device = source_shape(source), source_device(source)
    data_shape, scale_shape = output_shapes(job.target, shape, job.options.layout)
    target = job.target
    check_output("out.data", out.data, data_shape, job.data_dtypes)
    check_output("out.scale", out.scale, scale_shape, target.scale_dtypes)
    written = {"out.data": out.data, "out.scale": out.scale}
    second = None
    if target.code is TargetCode.NVFP4:
        if out.second_scale is None:
            raise KernelInputError("out.second_scale", "None", f"fp32 {list(shape[:-2])} for nvfp4")
        check_output("out.second_scale", out.second_scale, shape[:-2], (torch.float32,))
        second = written["out.second_scale"] = out.second_scale
    for argument, tensor in written.items():
        check_device(argument, tensor, device)
    check_disjoint(written, _read(source, amax))
    return Outputs(_viewed(out.data, job.op_data_dtype), _viewed(out.scale, target.op_scale_dtype), second, amax)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def _read(source: Source, amax: Tensor | None) -> dict[str, Tensor]:
    read = (
        {"the source": source.data, "its scale": source.scale}
        if isinstance(source, Encoded)
        else {"the source": source}
    )
    if isinstance(source, Encoded) and source.second is not None:
        read["its second scale"] = source.second
    if amax is not None:
        read["amax"] = amax
    return read


def _with_counters(outputs: Outputs, source: Source, *, check: bool, measure: bool) -> Outputs:
    device = source_device(source)
    bad = new_bad_counter(device) if check else None
    slots = sum_slots(source_shape(source))
    sums = torch.zeros((slots, 2), dtype=torch.float64, device=device) if measure else None
    return Outputs(outputs.data, outputs.scale, outputs.second, outputs.amax, bad, sums)


def _result(job: Job, outputs: Outputs, shape: tuple[int, ...], out: QuantizedTensor | None) -> QuantizedTensor:
    if out is not None:
        return QuantizedTensor(out.data, out.scale, job.key, shape, out.second_scale)
    assert outputs.data is not None  # noqa: S101  (_new_outputs made both)
    assert outputs.scale is not None  # noqa: S101
    data = outputs.data.view(job.data_dtype)
    return QuantizedTensor(data, outputs.scale.view(job.target.scale_dtype), job.key, shape, outputs.second)


def _raise_bad(job: Job, items: Sequence[tuple[Source, Outputs]], names: Sequence[str]) -> None:
    counters = [outputs.bad for _, outputs in items if outputs.bad is not None]
    for (source, _), name, counted in zip(items, names, torch.stack(counters).tolist(), strict=True):
        if counted[0]:
            rows = first_bad_rows(source, job.options.through, counted[1])
            raise NonFiniteError(name, rows, counted[0], _UNITS.get(job.target.name, "scale groups"))


def first_bad_rows(source: Source, through: torch.dtype, first: int) -> list[int]:
    """Return the first few rows that hold NaN, Inf or a bad scale; `first` is known to be the first of them."""
    weight = decode(source, through, checked=True)
    bad = (~weight.isfinite()).any(-1).flatten().nonzero().flatten()
    rows = [int(row) for row in bad[:_LISTED_ROWS]]
    return rows or [first]
