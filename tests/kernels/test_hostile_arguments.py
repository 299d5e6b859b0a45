"""Arguments of every kind, for every argument of every function: an answer, or an error of ours that names it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import quant_kernels as qk
from quant_kernels.checks import KernelInputError
from quant_spec import QuantFormat, QuantSpecError, get_format

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
MX = qk.quantize(WEIGHT, "mxfp8")
BLOCKS = qk.quantize(WEIGHT, "per_block_fp8")
ROWS = qk.quantize(WEIGHT, "ptpc_fp8")
COMPLEX = torch.complex(WEIGHT.float(), WEIGHT.float())
ONES = torch.ones(32, 64)
OPTIONS: dict[str, Any] = {
    "scale_rounding": None, "check": False, "out": None, "amax": None, "fnuz": False, "layout": "row_major",
    "measure": False,
}  # fmt: skip
# `through` and the formats themselves are tried with every value too.
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "quantize": (
        qk.quantize,
        {"w": WEIGHT, "format": "mxfp8", **OPTIONS, "name": "w", "parallel": None, "group": None},
    ),
    "quantize_many": (qk.quantize_many, {"weights": [WEIGHT, WEIGHT], "format": "mxfp4", **OPTIONS, "names": None}),
    "requantize": (
        qk.requantize,
        {
            "data": BLOCKS.data, "scale": BLOCKS.scale, "source": BLOCKS.key, "target": "ptpc_fp8",
            "second_scale": None, "offset": (0, 0), "shard_rows": None, "through": torch.bfloat16, "name": "data",
            **OPTIONS,
        },
    ),
    "requantize_many": (
        qk.requantize_many,
        {"sources": [MX], "target": "ptpc_fp8", "through": torch.bfloat16, **OPTIONS, "names": None},
    ),
    "dequantize": (
        qk.dequantize, {"q": MX, "dtype": torch.bfloat16, "offset": (0, 0), "shard_rows": None, "out": None},
    ),
    "amax": (qk.amax, {"w": WEIGHT, "granularity": "row", "through": torch.bfloat16, "out": None}),
    "e4m3fn_to_e4m3fnuz": (qk.e4m3fn_to_e4m3fnuz, {"data": ROWS.data, "scale": ROWS.scale}),
}  # fmt: skip
# Each of these took another way to an answer, or to an error of somebody else.
JUNK: dict[str, object] = {
    "None": None, "5": 5, "-1": -1, "2^70": 2**70, "1.5": 1.5, "nan": float("nan"), "True": True, "text": "xx",
    "bytes": b"x", "[]": [], "()": (), "{}": {}, "object": object(), "type": int, "dtype": torch.int8,
    "a format": get_format("mxfp4"), "a key": MX.key,
    "[1, 'a']": [1, "a"], "texts": ["a"] * 3, "(0,)": (0,), "(0.5, 0)": (0.5, 0), "('a', 0)": ("a", 0),
    "arrays": (np.ones(2), np.ones(2)),
    "(2^70, 0)": (2**70, 0), "(2^40, 0)": (2**40, 0), "(True, 0)": (True, 0), "quantized": MX, "three": [MX, MX, MX],
    "numpy": np.ones((32, 64)), "0-d": torch.tensor(1.0),
    "empty": torch.empty(0), "meta": torch.ones(32, 64, device="meta"),
    "sparse": ONES.to_sparse(), "compressed": ONES.to_sparse_csr(), "mkldnn": ONES.to_mkldnn(),
    "torch-quantized": torch.quantize_per_tensor(ONES, 0.1, 0, torch.quint8), "bool": ONES.bool(),
    "conjugated": COMPLEX.conj(), "negated": torch._neg_view(WEIGHT), "negated part": COMPLEX.conj().imag,
    "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "with grad": ONES.clone().requires_grad_(), "parameter": torch.nn.Parameter(ONES.clone()),
}  # fmt: skip


def refusal(call: Callable[..., object], **arguments: object) -> str:
    """Return what an error of ours says, or an empty text for an answer. Any other error fails the test."""
    try:
        call(**arguments)
    except QuantSpecError as error:
        assert str(error), arguments  # noqa: PT017  (an error may come or not)
        if isinstance(error, KernelInputError):
            assert re.match(r"[^:]+: found .+; allowed: .+", str(error), re.DOTALL), str(error)  # noqa: PT017
        return str(error)
    return ""


@pytest.mark.parametrize("kind", list(JUNK))
@pytest.mark.parametrize("function", list(CALLS))
def test_answer_or_named_error(function: str, kind: str) -> None:
    call, arguments = CALLS[function]
    before = [tensor.clone() for tensor in (WEIGHT, MX.data, MX.scale, BLOCKS.data, BLOCKS.scale)]
    for argument in arguments:
        said = refusal(call, **{**arguments, argument: JUNK[kind]})
        # Shapes and counts are told of what they do not fit to; errors of words show the word.
        others = r"data|scale|q\.shape|parallel|group|w|\$"
        assert re.match(rf"$|({argument})(\[\d+\])?(\.\w+)*: found|({others})", said), f"{argument}={kind}: {said}"
    after = (WEIGHT, MX.data, MX.scale, BLOCKS.data, BLOCKS.scale)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


PARTS = ("data", "scale", "key", "shape", "second_scale")


@pytest.mark.parametrize("kind", list(JUNK))
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_quantized_weights(part: str, kind: str) -> None:
    parts = {"data": MX.data, "scale": MX.scale, "key": MX.key, "shape": MX.shape, "second_scale": None}
    broken = qk.QuantizedTensor(**{**parts, part: JUNK[kind]})
    for call, arguments in (
        (qk.dequantize, {"q": broken}),
        (qk.amax, {"w": broken, "granularity": "1x32"}),
        (qk.requantize_many, {"sources": [broken], "target": "ptpc_fp8"}),
        (qk.quantize, {"w": WEIGHT, "format": "mxfp8", "out": broken}),
    ):
        said = refusal(call, **arguments)
        assert not said or part in said or "source" in said, said


@pytest.mark.parametrize("name", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"])
def test_weights_without_memory(name: str) -> None:
    weight = torch.empty(32, 64, device="meta")
    q = qk.quantize(weight, name)
    wanted = qk.quantize(WEIGHT, name)
    assert (q.data.shape, q.scale.shape, q.data.dtype) == (wanted.data.shape, wanted.scale.shape, wanted.data.dtype)
    assert q.data.is_meta
    assert qk.dequantize(q).is_meta
    assert qk.requantize_many([q], "mxfp4")[0].data.is_meta
    assert qk.amax(weight, "row").is_meta
    with pytest.raises(KernelInputError, match=r"^check: found True; allowed: False for a weight on meta"):
        qk.quantize(weight, name, check=True)


@pytest.mark.parametrize(
    "broken",
    [
        {"amax": torch.ones(3, 3)}, {"amax": ONES.to_sparse()}, {"scale_rounding": "evn"}, {"layout": 5},
        {"fnuz": True}, {"measure": 1}, {"name": 3}, {"w": WEIGHT.double()}, {"w": WEIGHT[:, :48]},
    ],
    ids=lambda broken: next(iter(broken)),
)  # fmt: skip
def test_destinations_are_left_alone(broken: dict[str, Any]) -> None:
    parts = {"data": torch.full((32, 64), 7, dtype=torch.uint8), "scale": torch.full((32, 2), 9, dtype=torch.uint8)}
    out = qk.QuantizedTensor(parts["data"].view(torch.float8_e4m3fn), parts["scale"], MX.key, MX.shape)
    with pytest.raises(KernelInputError):
        qk.quantize(**{"w": WEIGHT, "format": "mxfp8", "out": out, **broken})
    assert (parts["data"] == 7).all()
    assert (parts["scale"] == 9).all()


def views_that_negate() -> dict[str, torch.Tensor]:
    return {
        "bf16": torch._neg_view(WEIGHT),
        "fp32": COMPLEX.conj().imag,
        "stack": torch._neg_view(WEIGHT.view(2, 16, 64)),
        "strided": torch._neg_view(WEIGHT)[:, ::2],
    }


@pytest.mark.parametrize("name", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"])
@pytest.mark.parametrize("kind", list(views_that_negate()))
def test_views_that_negate_are_what_they_read_as(name: str, kind: str, same: Callable[..., None]) -> None:
    view = views_that_negate()[kind]
    assert view.is_neg()
    plain = view.resolve_neg()
    same(qk.quantize(view, name), qk.quantize(plain, name))
    same(qk.quantize(view, name, check=True), qk.quantize(plain, name))
    same(qk.quantize_many([view, view], name)[1], qk.quantize(plain, name))
    same(qk.amax(view, "row"), qk.amax(plain, "row"))
    wanted = qk.quantize(plain, name)
    negated = qk.QuantizedTensor(
        wanted.data, torch._neg_view(wanted.scale.float()) if name == "ptpc_fp8" else wanted.scale,
        wanted.key, wanted.shape, wanted.second_scale,
    )  # fmt: skip
    same(qk.dequantize(negated), qk.dequantize(wanted) * (-1 if name == "ptpc_fp8" else 1))


def test_destinations_that_cannot_be_written() -> None:
    leaf = torch.zeros(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(KernelInputError, match=r"^out: found a tensor that requires grad"):
        qk.dequantize(MX, out=leaf)
    with torch.no_grad():
        assert torch.equal(qk.dequantize(MX, out=leaf), qk.dequantize(MX))
    with pytest.raises(KernelInputError, match=r"^out: found a view that negates"):
        qk.dequantize(MX, out=torch._neg_view(torch.zeros(32, 64, dtype=torch.bfloat16)))
    with torch.inference_mode():
        made = torch.zeros(32, 64, dtype=torch.bfloat16)
        qk.dequantize(MX, out=made)
    with pytest.raises(KernelInputError, match=r"^out: found a tensor of inference mode"):
        qk.dequantize(MX, out=made)


def test_no_result_follows_a_gradient() -> None:
    leaf = torch.nn.Parameter(WEIGHT.float())
    for name in ("ptpc_fp8", "mxfp4", "nvfp4"):
        for q in (qk.quantize(leaf, name), qk.quantize(leaf, name, check=True)):
            assert not q.data.requires_grad
            assert not q.scale.requires_grad


def test_formats_without_kernels_take_what_they_can() -> None:
    """Options that only kernels have are refused, not passed over; checked mode is done."""
    base = get_format("mxfp4")
    reference = "quant_kernels.reference:quantize_mxfp4"
    own = QuantFormat(
        "own_format", "a test's", base.weight, None, scale_roundings=("even",), k_multiple=32, reference=reference
    )
    assert qk.quantize(WEIGHT, own).key == base.weight
    for option in ({"fnuz": True}, {"measure": True}, {"layout": "cdna"}, {"amax": torch.ones(32, 2)}, {"out": MX}):
        with pytest.raises(
            KernelInputError, match=rf"^{next(iter(option))}: found a value; allowed: none for own_format"
        ):
            qk.quantize(WEIGHT, own, **option)
    with pytest.raises(KernelInputError, match=r"^scale_rounding: found 'floor'; allowed: even"):
        qk.quantize(WEIGHT, own, scale_rounding="floor")
    bad = WEIGHT.clone()
    bad[3, 5] = torch.nan
    with pytest.raises(QuantSpecError, match=r"^mlp: 1 rows hold NaN"):
        qk.quantize(bad, own, check=True, name="mlp")
