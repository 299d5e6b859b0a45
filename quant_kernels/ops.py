"""torch operators of the conversions, `torch.ops.quant_kernels.*`: what a compiled graph calls.

For each target T of `quant_kernels.targets` (`ptpc_fp8`, `mxfp4`, `mxfp8`, `per_block_fp8`, `nvfp4`) there are a
functional `quantize_T` and a `quantize_T.out`; beside them `dequantize` and `amax`, likewise. A source is a plain
weight, or codes with `scale` (and `second_scale`, `block`, `offset`) as in `quant_kernels.encodings.Encoded`. E8M0
scales and packed codes are uint8 at this level, and FP8 codes may be (`element` then says `e4m3` or `e4m3fnuz`). Every
operator has a fake kernel and runs on every device: natively where the library serves it, else in plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.checks import check_choice, check_k, check_rank
from quant_kernels.encodings import Encoded
from quant_kernels.launch import Options, Outputs, Source, output_shapes, run, run_amax, run_dense
from quant_kernels.library import load_library
from quant_kernels.targets import LAYOUTS, ROUNDINGS, TARGETS, Target, TargetCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ELEMENTS: Final = {
    "": torch.uint8,
    "e2m1": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
_BLOCKS: Final = 'Tensor? second_scale=None, int[2] block=[1, 1], int[2] offset=[0, 0], str element=""'
_SOURCE: Final = f"Tensor? scale=None, {_BLOCKS}, ScalarType? through=None"
_OPTIONS: Final = 'str rounding="", str layout="row_major", Tensor? amax=None, bool fnuz=False'
_library: Final = torch.library.Library("quant_kernels", "FRAGMENT")


def _source(
    data: Tensor,
    scale: Tensor | None,
    second_scale: Tensor | None,
    block: Sequence[int],
    offset: Sequence[int],
    element: str,
) -> Source:
    check_rank("data", data)
    check_choice("element", element, tuple(_ELEMENTS))
    if scale is None:
        return data
    data = data.view(_ELEMENTS[element]) if data.dtype is torch.uint8 else data
    if second_scale is not None:
        scale = scale.view(torch.float8_e4m3fn)
    shape = (*data.shape[:-1], _columns(data, scale, element))
    return Encoded(data, scale, second_scale, (block[0], block[1]), (offset[0], offset[1]), shape)


def _columns(data: Tensor, scale: Tensor | None, element: str) -> int:
    packed = scale is not None and data.dtype is torch.uint8 and element in {"", "e2m1"}
    return data.shape[-1] * (2 if packed else 1)


def _options(target: Target, rounding: str, layout: str, through: torch.dtype | None, *, fnuz: bool) -> Options:
    check_choice("layout", layout, tuple(LAYOUTS))
    rounding = rounding or target.default_rounding or "even"
    check_choice("rounding", rounding, tuple(ROUNDINGS))
    return Options(rounding, layout, fnuz, through or torch.bfloat16)


def _empty(target: Target, data: Tensor, columns: int, *, layout: str, fnuz: bool) -> tuple[Tensor, ...]:
    """Return new outputs of a target for the weight that `data` holds."""
    check_rank("data", data)
    shape = (*data.shape[:-1], columns)
    check_k("data", shape[-1], target.k_multiple, target.name)
    data_shape, scale_shape = output_shapes(target, shape, layout)
    codes = torch.float8_e4m3fnuz if fnuz else target.op_data_dtype
    outputs = (
        data.new_empty(data_shape, dtype=codes),
        data.new_empty(scale_shape, dtype=target.op_scale_dtype),
    )
    if target.code is TargetCode.NVFP4:
        return (*outputs, data.new_empty(shape[:-2], dtype=torch.float32))
    return outputs


def _quantize_functions(target: Target) -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
    """Return functional, out, and fake implementations of `quantize_T`."""

    def out_kernel(  # noqa: PLR0913, PLR0917  (the schema's arguments)
        data: Tensor,
        scale: Tensor | None = None,
        second_scale: Tensor | None = None,
        block: Sequence[int] = (1, 1),
        offset: Sequence[int] = (0, 0),
        element: str = "",
        through: torch.dtype | None = None,
        rounding: str = "",
        layout: str = "row_major",
        amax: Tensor | None = None,
        fnuz: bool = False,  # noqa: FBT001, FBT002
        out_data: Tensor | None = None,
        out_scale: Tensor | None = None,
        out_second_scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        source = _source(data, scale, second_scale, block, offset, element)
        codes = torch.float8_e4m3fnuz if fnuz else target.op_data_dtype
        outputs = Outputs(
            None if out_data is None else out_data.view(codes),
            None if out_scale is None else out_scale.view(target.op_scale_dtype),
            out_second_scale,
            amax,
        )
        run([(source, outputs)], target, _options(target, rounding, layout, through, fnuz=fnuz))
        return ()

    def functional(  # noqa: PLR0913, PLR0917
        data: Tensor,
        scale: Tensor | None = None,
        second_scale: Tensor | None = None,
        block: Sequence[int] = (1, 1),
        offset: Sequence[int] = (0, 0),
        element: str = "",
        through: torch.dtype | None = None,
        rounding: str = "",
        layout: str = "row_major",
        amax: Tensor | None = None,
        fnuz: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, ...]:
        columns = _columns(data, scale, element)
        outputs = _empty(target, data, columns, layout=layout, fnuz=fnuz)
        out_kernel(data, scale, second_scale, block, offset, element, through, rounding, layout, amax, fnuz, *outputs)
        return outputs

    def fake(  # noqa: PLR0913, PLR0917
        data: Tensor,
        scale: Tensor | None = None,
        second_scale: Tensor | None = None,
        block: Sequence[int] = (1, 1),
        offset: Sequence[int] = (0, 0),
        element: str = "",
        through: torch.dtype | None = None,
        rounding: str = "",
        layout: str = "row_major",
        amax: Tensor | None = None,
        fnuz: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, ...]:
        del second_scale, block, offset, amax
        _options(target, rounding, layout, through, fnuz=fnuz)
        return _empty(target, data, _columns(data, scale, element), layout=layout, fnuz=fnuz)

    return functional, out_kernel, fake


def _define(name: str, schema: str, kernel: Callable[..., object], fake: Callable[..., object]) -> None:
    _library.define(f"{name}{schema}")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quant_kernels::{name}", fake, lib=_library)


def _define_quantize(target: Target) -> None:
    functional, out_kernel, fake = _quantize_functions(target)
    nvfp4 = target.code is TargetCode.NVFP4
    results = "(Tensor data, Tensor scale, Tensor second_scale)" if nvfp4 else "(Tensor data, Tensor scale)"
    destinations = "Tensor(a!) out_data, Tensor(b!) out_scale" + (", Tensor(c!) out_second_scale" if nvfp4 else "")
    name = f"quantize_{target.name}"
    _define(name, f"(Tensor data, *, {_SOURCE}, {_OPTIONS}) -> {results}", functional, fake)

    def out_only(data: Tensor, **options: object) -> None:
        out_kernel(data, **options)

    _define(f"{name}.out", f"(Tensor data, *, {_SOURCE}, {_OPTIONS}, {destinations}) -> ()", out_only, _fake_nothing)


def _fake_nothing(*_arguments: object, **_options: object) -> None:
    """Stand for an operator that only writes to its destinations."""


def _dequantize_out(
    data: Tensor,
    scale: Tensor,
    *,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    offset: Sequence[int] = (0, 0),
    element: str = "",
    out: Tensor,
) -> None:
    source = _source(data, scale, second_scale, block, offset, element)
    assert isinstance(source, Encoded)  # noqa: S101  (it has a scale)
    run_dense([(source, out)], out.dtype)


def _dequantize_fake(
    data: Tensor,
    scale: Tensor,
    *,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    offset: Sequence[int] = (0, 0),
    element: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    source = _source(data, scale, second_scale, block, offset, element)
    assert isinstance(source, Encoded)  # noqa: S101  (it has a scale)
    return data.new_empty(source.shape, dtype=dtype or torch.bfloat16)


def _dequantize(
    data: Tensor,
    scale: Tensor,
    *,
    second_scale: Tensor | None = None,
    block: Sequence[int] = (1, 1),
    offset: Sequence[int] = (0, 0),
    element: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = _dequantize_fake(
        data, scale, second_scale=second_scale, block=block, offset=offset, element=element, dtype=dtype
    )
    _dequantize_out(data, scale, second_scale=second_scale, block=block, offset=offset, element=element, out=out)
    return out


def _amax_out(data: Tensor, block: Sequence[int], *, out: Tensor) -> None:
    run_amax(data, out, (block[0], block[1]), torch.bfloat16)


def _amax_fake(data: Tensor, block: Sequence[int]) -> Tensor:
    check_rank("data", data)
    n, k = data.shape[-2:]
    return data.new_empty((*data.shape[:-2], -(-n // block[0]), -(-k // block[1])), dtype=torch.float32)


def _amax(data: Tensor, block: Sequence[int]) -> Tensor:
    out = _amax_fake(data, block)
    if data.numel() == 0:
        return out.zero_()
    _amax_out(data, block, out=out)
    return out


def _register() -> None:
    for target in TARGETS.values():
        _define_quantize(target)
    _define(
        "dequantize",
        f"(Tensor data, Tensor scale, *, {_BLOCKS}, ScalarType? dtype=None) -> Tensor",
        _dequantize,
        _dequantize_fake,
    )
    _define(
        "dequantize.out",
        f"(Tensor data, Tensor scale, *, {_BLOCKS}, Tensor(a!) out) -> ()",
        _dequantize_out,
        _fake_nothing,
    )
    _define("amax", "(Tensor data, int[2] block) -> Tensor", _amax, _amax_fake)
    _define("amax.out", "(Tensor data, int[2] block, *, Tensor(a!) out) -> ()", _amax_out, _fake_nothing)


load_library()
_register()
