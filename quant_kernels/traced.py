"""What a compiled graph records of a conversion: calls of the registered operators, not of the kernels' own entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant_kernels.encodings import Encoded

if TYPE_CHECKING:
    from torch import Tensor

    from quant_kernels.launch import Options, Outputs, Source
    from quant_kernels.targets import Target

_ELEMENTS = {torch.uint8: "e2m1", torch.float8_e4m3fn: "e4m3", torch.float8_e4m3fnuz: "e4m3fnuz"}


def trace_quantize(source: Source, outputs: Outputs, target: Target, options: Options) -> None:
    """Record `quantize_T.out`."""
    operator = getattr(_operators(), f"quantize_{target.name}").out
    destinations = {"out_data": outputs.data, "out_scale": outputs.scale}
    if outputs.second is not None:
        destinations["out_second_scale"] = outputs.second
    data, arguments = _source(source)
    operator(
        data,
        **arguments,
        **destinations,
        through=options.through,
        rounding=options.rounding,
        layout=options.layout,
        amax=outputs.amax,
        fnuz=options.fnuz,
    )


def trace_dense(source: Encoded, out: Tensor) -> None:
    """Record `dequantize.out`."""
    data, arguments = _source(source)
    scale = arguments.pop("scale")
    _operators().dequantize.out(data, scale, **arguments, out=out)


def trace_amax(source: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """Record `amax.out`."""
    _operators().amax.out(source, block, out=out)


def _operators() -> torch._ops._OpNamespace:
    # Imported while the first graph is recorded: what is never compiled needs no registered operators.
    import quant_kernels.ops  # noqa: F401, PLC0415

    return torch.ops.quant_kernels


def _source(source: Source) -> tuple[Tensor, dict[str, object]]:
    if not isinstance(source, Encoded):
        return source, {}
    return source.data, {
        "scale": source.scale,
        "second_scale": source.second,
        "block": source.block,
        "offset": source.offset,
        "element": _ELEMENTS[source.data.dtype],
    }
