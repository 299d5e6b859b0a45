"""Operators as torch wants them: opcheck, no graph break, out variants, empty weights, no device at import."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import quant_kernels as qk
import quant_kernels.ops
from quant_spec import QuantFormat, get_format, register_format
from quant_spec.formats.base import FORMATS as REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
OPS = torch.ops.quant_kernels
OUTS = ("out_data", "out_scale", "out_second_scale")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: opcheck compares arguments with allclose, which torch has not for FP8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def weight_on(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_opcheck_quantize(name: str, device: str) -> None:
    weight = weight_on(device, 2, 48, 96)
    operator = getattr(OPS, f"quantize_{name}")
    torch.library.opcheck(operator.default, (weight,))
    outs = operator(weight)
    torch.library.opcheck(
        operator.out, (weight,), {n: as_bytes(torch.empty_like(t)) for n, t in zip(OUTS, outs, strict=False)}
    )


@pytest.mark.parametrize("name", FORMATS)
def test_opcheck_requantize_and_dequantize(name: str, device: str) -> None:
    q = qk.quantize(weight_on(device, 48, 96), "mxfp8")
    source = {"scale": as_bytes(q.scale), "block": [1, 32], "element": "e4m3"}
    torch.library.opcheck(getattr(OPS, f"quantize_{name}").default, (as_bytes(q.data),), source)
    arguments = (as_bytes(q.data), source.pop("scale"))
    torch.library.opcheck(OPS.dequantize.default, arguments, source)
    torch.library.opcheck(OPS.dequantize.out, arguments, {**source, "out": weight_on(device, 48, 96)})


def test_opcheck_amax(device: str) -> None:
    torch.library.opcheck(OPS.amax.default, (weight_on(device, 48, 96), [1, 32]))
    out = torch.empty(48, 3, device=device)
    torch.library.opcheck(OPS.amax.out, (weight_on(device, 48, 96), [1, 32]), {"out": out})


def test_compiled_without_graph_break(device: str, same: Callable[..., None]) -> None:
    def convert(weight: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for name in FORMATS:
            q = qk.quantize(weight, name)
            again = qk.requantize(q.data, q.scale, source=q.key, target="mxfp4", second_scale=q.second_scale)
            found += [as_bytes(q.data), as_bytes(q.scale), qk.dequantize(q), as_bytes(again.data)]
        return [*found, qk.amax(weight, "row")]

    weight = weight_on(device, 48, 96)
    for found, wanted in zip(torch.compile(convert, fullgraph=True)(weight), convert(weight), strict=True):
        same(found, wanted)


def own_conversion(w: torch.Tensor, rounding: str | None) -> tuple[torch.Tensor, torch.Tensor, None]:
    """What a third party's format may name: plain torch."""
    assert rounding is None
    amax = w.abs().amax(-1, keepdim=True).float()
    return (w.float() / amax * 127).round().to(torch.int8), amax, None


@pytest.mark.parametrize("reference", [own_conversion, "quant_kernels.reference:quantize_mxfp4"], ids=["own", "named"])
def test_formats_without_kernels_compile_without_graph_break(reference: object) -> None:
    key = get_format("mxfp4").weight
    own = QuantFormat(f"compiled_{type(reference).__name__}", "a test's", key, None, reference=reference)
    weight = weight_on("cpu", 48, 96)
    register_format(own)
    try:
        for word in (own.name, own):
            compiled = torch.compile(
                lambda w, word=word: as_bytes(qk.quantize(w, word).data), fullgraph=True, backend="eager"
            )
            assert torch.equal(compiled(weight), as_bytes(qk.quantize(weight, word).data))
    finally:
        REGISTRY.unregister(own.name)


def test_compiled_in_a_process_that_registered_no_operators() -> None:
    code = """
import torch, quant_kernels as qk
w = torch.randn(32, 64)
found = torch.compile(lambda w: qk.quantize(w, "mxfp8").scale.view(torch.uint8), fullgraph=True, backend="eager")(w)
assert torch.equal(found, qk.quantize(w, "mxfp8").scale.view(torch.uint8))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FORMATS)
def test_out_halves_of_a_fused_weight(name: str, device: str, same: Callable[..., None]) -> None:
    """Gate and up write into the halves of one stack, in place."""
    gate, up = weight_on(device, 3, 128, 256), weight_on(device, 3, 128, 256) * 2
    both = qk.quantize(torch.cat((gate, up), 1), name)
    whole = qk.quantize(torch.zeros_like(torch.cat((gate, up), 1)), name)
    for half, weight in ((0, gate), (1, up)):
        rows = whole.scale.shape[1] // 2
        second = None if whole.second_scale is None else torch.empty_like(whole.second_scale)
        out = qk.QuantizedTensor(
            whole.data[:, half * 128 : half * 128 + 128],
            whole.scale[:, half * rows : half * rows + rows],
            whole.key,
            tuple(weight.shape),
            second,
        )
        same(qk.quantize(weight, name, out=out), qk.quantize(weight, name))
    if name != "nvfp4":  # whose second scale is of the whole weight
        same(whole.data, both.data)
        same(whole.scale, both.scale)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (0, 4, 64), (5, 0)])
def test_empty_weights(name: str, shape: tuple[int, ...], device: str) -> None:
    q = qk.quantize(torch.empty(shape, device=device), name, check=True, measure=True)
    assert q.data.numel() == 0
    assert qk.dequantize(q).shape == shape
    assert q.error_sums.tolist() == [0, 0]


def test_same_result_every_time(device: str, same: Callable[..., None]) -> None:
    weight = weight_on(device, 3, 300, 416)
    for name in FORMATS:
        first = qk.quantize(weight, name, measure=True)
        for _ in range(3):
            again = qk.quantize(weight, name, measure=True)
            same(again, first)
            assert torch.equal(again.error_sums, first.error_sums)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_streams(same: Callable[..., None]) -> None:
    weight = weight_on("cuda", 4, 256, 512)
    wanted = {name: qk.quantize(weight, name) for name in FORMATS}
    outs = {name: qk.quantize(torch.zeros_like(weight), name) for name in FORMATS}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name in FORMATS:
            qk.quantize(weight, name, out=outs[name])
    graph.replay()
    torch.cuda.synchronize()
    for name in FORMATS:
        same(outs[name], wanted[name])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = qk.quantize(weight, "mxfp4")
    stream.synchronize()
    same(found, wanted["mxfp4"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8"])
def test_more_than_two_to_the_32_elements(name: str) -> None:
    weight = torch.empty(1_050_000, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    q = qk.quantize(weight, name)
    rows = slice(-256, None)
    tail = qk.quantize(weight[1_050_000 - 1_050_000 % 128 - 256 :], name)
    assert torch.equal(q.data[rows].view(torch.uint8), tail.data[rows].view(torch.uint8))


def test_import_touches_no_device() -> None:
    code = "import quant_kernels, torch; quant_kernels.quantize; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_alone_is_without_torch() -> None:
    code = "import sys, quant_kernels; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
