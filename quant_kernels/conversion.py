"""quantize, dequantize, requantize, amax: the conversions as functions on tensors, native where a kernel is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quant_kernels.arguments import (
    as_format,
    as_key,
    check_destination,
    check_destinations,
    check_flags,
    check_float,
    check_list,
    check_names,
    check_offset,
    check_quantized,
    check_tensor,
    check_type,
)
from quant_kernels.checks import (
    WEIGHT_DTYPES,
    KernelInputError,
    check_device,
    check_disjoint,
    check_dtype,
    check_output,
    check_rank,
)
from quant_kernels.direct import dequantize_directly, quantize_directly
from quant_kernels.encodings import encode_source
from quant_kernels.job import convert, new_job
from quant_kernels.launch import run_dense
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS
from quant_kernels.without_kernels import quantize_by_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from quant_kernels.loading.distributed import Ranks
    from quant_spec import QuantFormat, QuantKey


def quantize(  # noqa: PLR0913  (each changes one thing about the result)
    w: Tensor,
    format: str | QuantFormat,  # noqa: A002  (the word of the documents)
    *,
    scale_rounding: str | None = None,
    check: bool = False,
    out: QuantizedTensor | None = None,
    amax: Tensor | None = None,
    fnuz: bool = False,
    layout: str = "row_major",
    measure: bool = False,
    name: str = "w",
    parallel: Literal["column", "row"] | None = None,
    group: Ranks | dist.ProcessGroup | DeviceMesh | None = None,
) -> QuantizedTensor:
    """Quantize a weight, or this rank's shard of one.

    Args:
        w: float32, float16 or bfloat16 [N, K] or [E, N, K], any strides, any device.
        format: name of a registered format, or the format.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: the format's default.
        check: count NaN and Inf in the same pass and raise if there are any (one synchronisation).
        out: tensors to write into, of the shapes and dtypes that this function returns; they may be strided. Their
            contents are undefined after an error.
        amax: fp32 greatest magnitudes to use instead of the weight's own, in the shape of the scales (NVFP4: one a
            matrix): what all ranks agreed on, for a shard of a weight.
        fnuz: `ptpc_fp8` only: float8_e4m3fnuz codes, for hardware that reads those (gfx942).
        layout: `row_major`, or `cdna`: the tile order of AMD's matrix kernels, for codes and E8M0 scales.
        measure: also sum up Σ w² and Σ (w − ŵ)², into `error_sums`.
        name: what errors call the weight.
        parallel: with `group`: `w` is a shard, cut along the output side (`column`) or the input side (`row`).
        group: process group or one-dimensional mesh, all of whose ranks call this; the result is the shard of the
            quantized whole weight (`quantize_shard`), which takes no `out`, `amax` or `layout`.

    Raises:
        KernelInputError: an argument does not fit; nothing was written.
        NonFiniteError: `check` found NaN or Inf.
        quant_spec.ConfigError: no format has that name.
        quant_spec.LoadError: the ranks' shards do not fit, or one does not answer.
    """
    check_type("name", name, str, "a text")
    check_type("layout", layout, str, "row_major, cdna")
    check_flags(check=check, fnuz=fnuz, measure=measure)
    if group is not None or parallel is not None:
        return _quantize_on_ranks(
            check_tensor("w", w),
            as_format("format", format),
            parallel,
            group,
            scale_rounding,
            check=check,
            fnuz=fnuz,
            measure=measure,
            name=name,
            unfit={"out": out is not None, "amax": amax is not None, "layout": layout != "row_major"},
        )
    plain = not (check or fnuz or measure) and out is None and amax is None
    if plain and layout == "row_major" and isinstance(format, str) and not torch.compiler.is_compiling():
        found = quantize_directly(w, format, scale_rounding)
        if found is not None:
            return found
    return quantize_many(
        [w],
        format,
        scale_rounding=scale_rounding,
        check=check,
        out=None if out is None else [out],
        amax=None if amax is None else [amax],
        fnuz=fnuz,
        layout=layout,
        measure=measure,
        names=[name],
    )[0]


def _quantize_on_ranks(  # noqa: PLR0913  (as quantize)
    w: Tensor,
    format: str | QuantFormat,  # noqa: A002
    parallel: Literal["column", "row"] | None,
    group: Ranks | dist.ProcessGroup | DeviceMesh | None,
    scale_rounding: str | None,
    *,
    check: bool,
    fnuz: bool,
    measure: bool,
    name: str,
    unfit: dict[str, bool],
) -> QuantizedTensor:
    from quant_kernels.loading.parallel import quantize_shard  # noqa: PLC0415  (it is made of what is defined here)

    if parallel is None or group is None:
        missing = "parallel" if parallel is None else "group"
        raise KernelInputError(missing, "None", "both parallel and group, or neither")
    for argument, given in unfit.items():
        if given:
            raise KernelInputError(argument, "a value", "none together with group")
    return quantize_shard(
        w,
        format,
        parallel=parallel,
        group=group,
        scale_rounding=scale_rounding,
        check=check,
        fnuz=fnuz,
        measure=measure,
        name=name,
    )


def quantize_many(  # noqa: PLR0913  (as quantize)
    weights: Sequence[Tensor],
    format: str | QuantFormat,  # noqa: A002
    *,
    scale_rounding: str | None = None,
    check: bool = False,
    out: Sequence[QuantizedTensor] | None = None,
    amax: Sequence[Tensor] | None = None,
    fnuz: bool = False,
    layout: str = "row_major",
    measure: bool = False,
    names: Sequence[str] | None = None,
) -> list[QuantizedTensor]:
    """Quantize the weights of a layer in one launch: `quantize` for a list of weights of one dtype and device.

    Raises:
        KernelInputError, NonFiniteError, quant_spec.ConfigError: as `quantize`.
    """
    given = check_list("weights", weights)
    check_flags(check=check, fnuz=fnuz, measure=measure)
    quant_format = as_format("format", format)
    places = [f"weights[{i}]" if len(given) > 1 else "w" for i in range(len(given))]
    called = check_names(names, places, len(given))
    if not given:
        return []
    found = [check_tensor(label, weight) for label, weight in zip(called, given, strict=True)]
    for label, weight in zip(called, found, strict=True):
        check_rank(label, weight)
        check_dtype(label, weight, WEIGHT_DTYPES)
        check_dtype(label, weight, (found[0].dtype,))
        check_device(label, weight, found[0].device)
    if quant_format.name not in TARGETS:
        unfit = _unfit(out, amax, layout, fnuz=fnuz, measure=measure)
        return [
            quantize_by_reference(w, quant_format, scale_rounding, check=check, name=label, unfit=unfit)
            for label, w in zip(called, found, strict=True)
        ]
    job = new_job(quant_format, scale_rounding, fnuz=fnuz, layout=layout, through=found[0].dtype)
    return convert(job, found, called, check=check, out=_outs(out), amax=_maxima(amax), measure=measure)


def _unfit(out: object, amax: object, layout: object, *, fnuz: bool, measure: bool) -> dict[str, bool]:
    """Return which options were asked for that only kernels have."""
    return {
        "out": out is not None,
        "amax": amax is not None,
        "layout": layout != "row_major",
        "fnuz": fnuz,
        "measure": measure,
    }


def _outs(out: object) -> list[QuantizedTensor] | None:
    if out is None:
        return None
    given = check_list("out", out)
    return [check_destinations("out" if len(given) == 1 else f"out[{i}]", each) for i, each in enumerate(given)]


def _maxima(amax: object) -> list[Tensor] | None:
    if amax is None:
        return None
    given = check_list("amax", amax)
    return [check_tensor("amax" if len(given) == 1 else f"amax[{i}]", each) for i, each in enumerate(given)]


def requantize(  # noqa: D417, PLR0913  (each describes one thing about the source or the result)
    data: Tensor,
    scale: Tensor,
    *,
    source: QuantKey | str,
    target: str | QuantFormat,
    second_scale: Tensor | None = None,
    offset: tuple[int, int] = (0, 0),
    shard_rows: Sequence[int] | None = None,
    through: torch.dtype = torch.bfloat16,
    scale_rounding: str | None = None,
    check: bool = False,
    out: QuantizedTensor | None = None,
    amax: Tensor | None = None,
    fnuz: bool = False,
    layout: str = "row_major",
    measure: bool = False,
    name: str = "data",
) -> QuantizedTensor:
    """Re-quantize a weight in one pass: the result of `dequantize` to `through`, then `quantize`, bit for bit.

    Args:
        data: codes [.., N, K] (4-bit: [.., N, K/2]).
        scale: scales as `source` stores them. FP8 scales may be fp32 or E8M0 (float8_e8m0fnu or uint8); a per-tensor
            source has one, one a matrix, or one a shard.
        source: format of the codes.
        target: name of a registered format, or the format.
        second_scale: NVFP4 sources: fp32, one for all or one a matrix; None: 1.
        offset: block sources: row and column of the first element within the first scale's block (a shard that was cut
            off the block grid).
        shard_rows: rows of each shard of a fused weight with one scale a shard.
        through: the model's dtype, which the source is rounded to on its way.
        scale_rounding, check, out, amax, fnuz, layout, measure, name: as for `quantize`. Checked mode also refuses
            scales that are NaN or negative.

    Raises:
        KernelInputError, NonFiniteError, quant_spec.ConfigError: as `quantize`.
    """
    check_type("name", name, str, "a text")
    check_flags(check=check, fnuz=fnuz, measure=measure)
    check_float("through", through)
    quant_format = as_format("target", target)
    encoded = encode_source(
        check_tensor("data", data),
        check_tensor("scale", scale),
        as_key("source", source),
        second_scale=None if second_scale is None else check_tensor("second_scale", second_scale),
        offset=offset,
        shard_rows=shard_rows,
    )
    if quant_format.name not in TARGETS:
        unfit = _unfit(out, amax, layout, fnuz=fnuz, measure=measure)
        weight = torch.empty(encoded.shape, dtype=through, device=data.device)
        run_dense([(encoded, weight)], through)
        return quantize_by_reference(weight, quant_format, scale_rounding, check=check, name=name, unfit=unfit)
    job = new_job(quant_format, scale_rounding, fnuz=fnuz, layout=layout, through=through)
    return convert(
        job,
        [encoded],
        [name],
        check=check,
        out=None if out is None else _outs([out]),
        amax=None if amax is None else _maxima([amax]),
        measure=measure,
    )[0]


def requantize_many(  # noqa: D417, PLR0913  (as requantize)
    sources: Sequence[QuantizedTensor],
    target: str | QuantFormat,
    *,
    through: torch.dtype = torch.bfloat16,
    scale_rounding: str | None = None,
    check: bool = False,
    out: Sequence[QuantizedTensor] | None = None,
    amax: Sequence[Tensor] | None = None,
    fnuz: bool = False,
    layout: str = "row_major",
    measure: bool = False,
    names: Sequence[str] | None = None,
) -> list[QuantizedTensor]:
    """Re-quantize the weights of a layer in one launch: `requantize` for a list of weights of one kind of source.

    Args:
        sources: quantized weights whose codes and scales have one dtype each.
        target: name of a format that has kernels, or the format.
        through, scale_rounding, check, out, amax, fnuz, layout, measure, names: as for `requantize` and
            `quantize_many`.

    Raises:
        KernelInputError, NonFiniteError, quant_spec.ConfigError: as `quantize`.
    """
    given = check_list("sources", sources)
    check_flags(check=check, fnuz=fnuz, measure=measure)
    check_float("through", through)
    quant_format = as_format("target", target)
    called = check_names(names, [f"sources[{i}]" for i in range(len(given))], len(given))
    if not given:
        return []
    found = [check_quantized(label, q) for label, q in zip(called, given, strict=True)]
    encoded = []
    for label, q in zip(called, found, strict=True):
        check_dtype(f"{label}.data", q.data, (found[0].data.dtype,))
        check_dtype(f"{label}.scale", q.scale, (found[0].scale.dtype,))
        check_device(f"{label}.data", q.data, found[0].data.device)
        encoded.append(encode_source(q.data, q.scale, q.key, second_scale=q.second_scale))
    if quant_format.name not in TARGETS:
        raise KernelInputError("target", repr(quant_format.name), ", ".join(TARGETS))
    job = new_job(quant_format, scale_rounding, fnuz=fnuz, layout=layout, through=through)
    return convert(job, encoded, called, check=check, out=_outs(out), amax=_maxima(amax), measure=measure)


def dequantize(  # noqa: D417  (two are described together)
    q: QuantizedTensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    offset: tuple[int, int] = (0, 0),
    shard_rows: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return code x scale in fp32, rounded once to `dtype`.

    Args:
        q: a quantized weight in row-major order.
        dtype: float32, float16 or bfloat16.
        offset, shard_rows: as for `requantize`.
        out: tensor [.., N, K] of `dtype` to write into.

    Raises:
        KernelInputError: an argument does not fit; nothing was written.
    """
    check_float("dtype", dtype)
    check_type("q", q, QuantizedTensor, "a QuantizedTensor")
    if out is None and shard_rows is None and check_offset(offset) == (0, 0) and not torch.compiler.is_compiling():
        found = dequantize_directly(q, dtype)
        if found is not None:
            return found
    q = check_quantized("q", q)
    encoded = encode_source(q.data, q.scale, q.key, second_scale=q.second_scale, offset=offset, shard_rows=shard_rows)
    if tuple(q.shape) != tuple(encoded.shape):
        raise KernelInputError("q.shape", str(list(q.shape)), f"{list(encoded.shape)}, which the codes hold")
    if out is None:
        out = torch.empty(encoded.shape, dtype=dtype, device=q.data.device)
    else:
        out = check_destination("out", out)
        check_device("out", out, q.data.device)
        check_output("out", out, encoded.shape, (dtype,))
        second = {} if q.second_scale is None else {"q.second_scale": q.second_scale}
        check_disjoint({"out": out}, {"q.data": q.data, "q.scale": q.scale, **second})
    run_dense([(encoded, out)], dtype)
    return out
