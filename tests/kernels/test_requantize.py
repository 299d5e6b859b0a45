"""Re-quantization in one pass equals dequantize, then quantize, bit for bit; and both equal plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import quant_kernels as qk

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sources(shape: tuple[int, ...]) -> dict[str, tuple[dict[str, object], torch.Tensor | None]]:
    """Arguments of `requantize` for every kind of source."""
    generator = torch.Generator().manual_seed(0)
    lead, (n, k) = shape[:-2], shape[-2:]
    codes = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    weight = torch.randn(shape, generator=generator)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator) + 0.01

    def bytes_(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def blocks(rows: int, cols: int) -> tuple[int, ...]:
        return (*lead, -(-rows // 128), -(-cols // 128))

    found = {
        "per tensor": {"data": codes, "scale": scales(1), "source": "fp8_e4m3/per_tensor"},
        "per channel": {"data": codes, "scale": scales(*lead, n, 1), "source": "fp8_e4m3/per_channel"},
        "blocks": {"data": codes, "scale": scales(*blocks(n, k)), "source": "fp8_e4m3/block_128x128"},
        "blocks, powers of two": {"data": codes, "scale": bytes_(*blocks(n, k)), "source": "fp8_e4m3/block_128x128"},
        "1 x 128": {"data": codes, "scale": scales(*lead, n, -(-k // 128)), "source": "fp8_e4m3/block_1x128"},
        "off the grid": {
            "data": codes, "scale": scales(*blocks(n + 50, k + 100)), "source": "fp8_e4m3/block_128x128",
            "offset": (50, 100),
        },
    }  # fmt: skip
    if lead == ():
        found["per shard"] = {
            "data": codes, "scale": scales(3), "source": "fp8_e4m3/per_tensor", "shard_rows": (n - 30, 10, 20),
        }  # fmt: skip
    else:
        found["per expert"] = {"data": codes, "scale": scales(*lead), "source": "fp8_e4m3/per_tensor"}
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        if k % 32 == 0:
            q = qk.quantize(weight, name)
            found[name] = {"data": q.data, "scale": q.scale, "source": q.key, "second_scale": q.second_scale}
    q = qk.quantize(weight, "ptpc_fp8", fnuz=True)
    found["fnuz"] = {"data": q.data, "scale": q.scale, "source": q.key}
    return found


def on(device: str, arguments: dict[str, object]) -> dict[str, object]:
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}


SHAPES = [(200, 352), (3, 130, 160), (2, 256, 512), (64, 7168)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_pass_is_two_steps(
    shape: tuple[int, ...], target: str, device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    for arguments in sources(shape).values():
        moved = on(device, arguments)
        for through in DTYPES:
            found = qk.requantize(**moved, target=target, through=through)
            same(found, reference(qk.requantize, **arguments, target=target, through=through))
            key = qk.QuantizedTensor(
                moved["data"], moved["scale"], qk_key(moved["source"]), tuple(shape), moved.get("second_scale")
            )
            dense = qk.dequantize(key, through, offset=moved.get("offset", (0, 0)), shard_rows=moved.get("shard_rows"))
            same(found, qk.quantize(dense, target))


def qk_key(source: object) -> object:
    from quant_spec import QuantKey

    return QuantKey.parse(source) if isinstance(source, str) else source


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_shapes_dequantize(
    dtype: torch.dtype, device: str, reference: Callable[..., Any], same: Callable[..., None]
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(39)[: 37 * 261].reshape(37, 261).view(torch.float8_e4m3fn)
    scale = torch.rand(37, 1)
    q = qk.QuantizedTensor(codes, scale, qk_key("fp8_e4m3/per_channel"), (37, 261))
    moved = qk.QuantizedTensor(codes.to(device), scale.to(device), q.key, q.shape)
    same(qk.dequantize(moved, dtype), reference(qk.dequantize, q, dtype))


def test_zero_scale_decodes_to_zero(device: str) -> None:
    codes = torch.full((32, 64), 100.0, device=device).to(torch.float8_e4m3fn)
    found = qk.requantize(
        codes, torch.zeros(1, device=device), source="fp8_e4m3/per_tensor", target="ptpc_fp8", check=True
    )
    assert found.data.float().abs().max() == 0
    assert torch.equal(found.scale.cpu(), torch.ones(32, 1))


@pytest.mark.parametrize("scale", [-1.0, float("nan")])
def test_bad_scales_are_raised(scale: float, device: str) -> None:
    from quant_kernels.checks import NonFiniteError

    codes = torch.full((300, 256), 1.0, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(3, 2, device=device)
    scales[1, 1] = scale
    for target in TARGETS:
        with pytest.raises(NonFiniteError, match=r"layer\.7: .* first bad rows: 128, 129, 130, 131, 132"):
            qk.requantize(codes, scales, source="fp8_e4m3/block_128x128", target=target, check=True, name="layer.7")
