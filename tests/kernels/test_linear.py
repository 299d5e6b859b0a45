"""The linear product: against float64 within a bound, in every format, dtype and activation; as an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import quant_kernels as qk
from quant_kernels import activations, linear_run
from quant_spec import QuantKey

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = torch.ops.quant_kernels
# Half an ulp of each dtype, relative.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def key(word: str) -> QuantKey | None:
    return QuantKey.parse(word) if word else None


def exact(x: torch.Tensor, q: qk.QuantizedTensor, word: str, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The product in float64, of the activation quantized in float32, and the sum of its magnitudes."""
    rounded = activations.round_activation(x.float().cpu().reshape(-1, x.shape[-1]), word).double()
    parts = {name: None if p is None else p.cpu() for name, p in vars(q).items() if isinstance(p, torch.Tensor)}
    on_cpu = qk.QuantizedTensor(parts["data"], parts["scale"], q.key, q.shape, second_scale=parts.get("second_scale"))
    weight = qk.dequantize(on_cpu, torch.float32).double()
    offset = 0.0 if bias is None else bias.double().cpu()
    shape = (*x.shape[:-1], weight.shape[0])
    wanted, magnitude = rounded @ weight.T + offset, rounded.abs() @ weight.abs().T + abs(offset)
    return wanted.view(shape), magnitude.view(shape)


def check(found: torch.Tensor, x: torch.Tensor, q: qk.QuantizedTensor, word: str, bias: torch.Tensor | None) -> None:
    """Each operand may be rounded once to the dtype, sums are in fp32, the result is rounded at most twice."""
    wanted, magnitude = exact(x, q, word, bias)
    unit = ROUNDING[x.dtype]
    bound = 2 * unit * wanted.abs() + (2 * unit + (x.shape[-1] + 8) * 2.0**-24) * magnitude + 1e-30
    worst = ((found.double().cpu() - wanted).abs() / bound).max()
    assert worst <= 1, float(worst)
    # The bound is far from what happens: errors of many terms cancel. A wrong term would not.
    error = (found.double().cpu() - wanted).norm() / wanted.norm()
    assert error <= unit + 2.0**-20, float(error)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of as few rows as there can be."""
    monkeypatch.setattr(linear_run, "_TILE_BYTES", 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("word", ["", *activations.ACTIVATIONS])
def test_within_the_bound(name: str, word: str, dtype: torch.dtype, device: str) -> None:
    q = qk.quantize(random(200, 256).to(device, dtype), name)
    for batch, biased in (((3,), False), ((2, 9), True)):
        x = random(*batch, 256, seed=1).to(device, dtype)
        bias = random(200, seed=2).to(device, dtype) if biased else None
        check(qk.linear(x, q, bias=bias, activation=key(word)), x, q, word, bias)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FORMATS)
def test_tiles_are_the_whole(name: str, device: str) -> None:
    """A weight cut into its smallest tiles, ragged at the end, in any of the ways to store scales."""
    q = qk.quantize(random(300, 160).to(device), name)
    x, bias = random(70, 160, seed=1).to(device), random(300, seed=2).to(device)
    check(qk.linear(x, q, bias=bias), x, q, "", bias)


def test_one_scale_for_the_whole_weight(device: str) -> None:
    weight = random(300, 64).to(device)
    codes = weight.to(torch.float8_e4m3fn)
    q = qk.QuantizedTensor(codes, torch.tensor(0.25, device=device), QuantKey.parse("fp8_e4m3/per_tensor"), (300, 64))
    x = random(5, 64, seed=1).to(device)
    check(qk.linear(x, q), x, q, "", None)


def test_memory_is_bounded_by_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is larger than allowed, and the tiles cover the weight once."""
    monkeypatch.setattr(linear_run, "_TILE_BYTES", 64 << 10)
    q = qk.quantize(random(1000, 128), "mxfp4")
    encoded = linear_run.Encoded(q.data.view(torch.uint8), q.scale.view(torch.uint8), None, (1, 32), (0, 0), q.shape)
    tiles = [(rows, tile.clone()) for rows, tile in linear_run.weight_tiles(encoded, torch.float32)]
    assert len(tiles) > 1
    assert max(tile.nbytes for _, tile in tiles) <= 64 << 10
    assert torch.equal(torch.cat([tile for _, tile in tiles]), qk.dequantize(q, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("word", ["", *activations.ACTIVATIONS])
def test_same_result_every_time(name: str, word: str, device: str) -> None:
    q = qk.quantize(random(96, 512).to(device, torch.bfloat16), name)
    for batch in (1, 16, 40):
        x = random(batch, 512, seed=1).to(device, torch.bfloat16)
        first = qk.linear(x, q, activation=key(word))
        assert all(torch.equal(qk.linear(x, q, activation=key(word)), first) for _ in range(5))


@pytest.mark.parametrize("name", FORMATS)
def test_out_may_be_strided(name: str, device: str) -> None:
    q = qk.quantize(random(48, 64).to(device), name)
    x = random(2, 3, 64, seed=1).to(device)
    whole = torch.full((2, 3, 100), 7.0, device=device)
    out = whole[..., 20:68]
    assert qk.linear(x, q, out=out) is out
    assert torch.equal(out, qk.linear(x, q))
    assert (whole[..., :20] == 7).all()
    assert (whole[..., 68:] == 7).all()


def test_x_may_be_strided(device: str) -> None:
    q = qk.quantize(random(48, 64).to(device), "ptpc_fp8")
    x = random(64, 2, 5, seed=1).to(device).permute(2, 1, 0)
    for word in ("", *activations.ACTIVATIONS[:1]):
        found = qk.linear(x, q, activation=key(word))
        torch.testing.assert_close(found, qk.linear(x.contiguous(), q, activation=key(word)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "k", "batch"), [(0, 64, (2,)), (8, 64, (0,)), (8, 0, (2,)), (8, 64, (2, 0))])
def test_nothing_to_multiply(n: int, k: int, batch: tuple[int, ...], device: str) -> None:
    q = qk.quantize(torch.empty(n, k, device=device), "ptpc_fp8")
    bias = random(n).to(device)
    found = qk.linear(torch.empty(*batch, k, device=device), q, bias=bias)
    assert torch.equal(found, bias.expand(*batch, n))


@pytest.mark.parametrize("name", FORMATS)
def test_gradients(name: str, device: str) -> None:
    """By x and bias as those of the product with the dequantized weight; a rounded activation passes it on."""
    q = qk.quantize(random(40, 128).to(device), name)
    weight = qk.dequantize(q, torch.float32)
    for word in ("", activations.MXFP8):
        x = random(2, 3, 128, seed=1).to(device).requires_grad_()
        bias = random(40, seed=2).to(device).requires_grad_()
        gradient = random(2, 3, 40, seed=3).to(device)
        qk.linear(x, q, bias=bias, activation=key(word)).backward(gradient)
        torch.testing.assert_close(x.grad, gradient @ weight, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias.grad, gradient.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("word", ["", activations.PER_TOKEN])
def test_opcheck(name: str, word: str, device: str) -> None:
    q = qk.quantize(random(48, 64).to(device, torch.bfloat16), name)
    block = {"ptpc_fp8": [1, 64], "per_block_fp8": [128, 128], "nvfp4": [1, 16]}.get(name, [1, 32])
    element = "e2m1" if q.data.dtype is torch.float4_e2m1fn_x2 else "e4m3"
    scale = q.scale if q.scale.dtype is torch.float32 else q.scale.view(torch.uint8)
    arguments = (q.data.view(torch.uint8), scale, q.second_scale, block, element)
    x = random(3, 64, seed=1).to(device, torch.bfloat16)
    bias = random(48, seed=2).to(device, torch.bfloat16)
    torch.library.opcheck(OPS.linear.default, (x.requires_grad_(), *arguments, bias.requires_grad_(), word))
    x, bias = x.detach(), bias.detach()
    torch.library.opcheck(OPS.linear.out, (x, *arguments, bias, word), {"out": x.new_empty(3, 48)})
    torch.library.opcheck(OPS.linear_input_gradient.default, (x.new_ones(3, 48), *arguments))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("word", ["", activations.PER_TOKEN, activations.MXFP4])
def test_nan_stays_in_its_row_and_token(name: str, word: str, device: str) -> None:
    weight = random(200, 64)
    weight[150, 5] = torch.nan
    q = qk.quantize(weight.to(device, torch.bfloat16), name)
    x = random(4, 64, seed=1).to(device, torch.bfloat16)
    x[1, 7] = torch.nan
    nan = qk.linear(x, q, activation=key(word)).isnan().cpu()
    assert nan[1].all()
    assert nan[:, 150].all()
    kept = {"per_block_fp8": 128, "nvfp4": 0}.get(name, 150)  # whose scales span more rows
    assert not nan[[0, 2, 3], :kept].any()


def test_compiled_without_graph_break(device: str) -> None:
    names = ("ptpc_fp8", "mxfp4", "nvfp4")
    qs = [qk.quantize(random(64, 128).to(device, torch.bfloat16), name) for name in names]
    keys = [key(word) for word in ("", activations.PER_TOKEN, activations.MXFP8)]

    def layers(x: torch.Tensor) -> list[torch.Tensor]:
        return [qk.linear(x, q, activation=activation) for q in qs for activation in keys]

    x = random(3, 128, seed=1).to(device, torch.bfloat16)
    for found, wanted in zip(torch.compile(layers, fullgraph=True)(x), layers(x), strict=True):
        assert torch.equal(found, wanted)


def test_the_last_group_of_an_activation_may_be_shorter() -> None:
    x = random(5, 200, seed=3)
    rounded = activations.round_activation(x, activations.GROUP_128)
    for columns in (slice(0, 128), slice(128, 200)):
        assert torch.equal(rounded[:, columns], activations.round_activation(x[:, columns], activations.PER_TOKEN))


def refused() -> Iterator[tuple[str, dict[str, object]]]:
    q = qk.quantize(random(48, 64), "mxfp4")
    x = random(3, 64)
    yield "x", {"x": random(3, 96), "weight": q}
    yield "x", {"x": x.double(), "weight": q}
    yield "x", {"x": torch.tensor(1.0), "weight": q}
    yield "weight", {"x": x, "weight": qk.quantize(random(2, 48, 64), "mxfp4")}
    yield "bias", {"x": x, "weight": q, "bias": random(64)}
    yield "bias", {"x": x, "weight": q, "bias": torch.zeros(48, dtype=torch.int32)}
    yield "out", {"x": x, "weight": q, "out": random(3, 64)}
    yield "out", {"x": x, "weight": q, "out": random(3, 48).bfloat16()}
    yield "out", {"x": x, "weight": q, "out": x[:, :48]}
    yield "activation", {"x": x, "weight": q, "activation": key("mxfp4")}
    yield "activation", {"x": x, "weight": q, "activation": key("fp8_e4m3/per_tensor:static")}
    yield "activation", {"x": x, "weight": q, "activation": key("int8/per_token:dynamic")}
    ragged = {"x": random(3, 72), "weight": qk.quantize(random(48, 72), "ptpc_fp8")}
    yield "activation", {**ragged, "activation": key(activations.MXFP8)}
    row = qk.quantize(random(48, 80), "ptpc_fp8")
    yield "activation", {"x": random(3, 80), "weight": row, "activation": key(activations.MXFP8)}
    yield "weight.shape", {"x": x, "weight": qk.QuantizedTensor(q.data, q.scale, q.key, (48, 32))}


@pytest.mark.parametrize(("argument", "arguments"), list(refused()))
def test_refused_by_name(argument: str, arguments: dict[str, object]) -> None:
    with pytest.raises(qk.checks.KernelInputError) as error:
        qk.linear(**arguments)
    assert error.value.argument == argument
