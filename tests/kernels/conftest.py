"""Fixtures of the kernel tests: devices, the plain-torch reference as the other implementation, comparison by bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from quant_kernels.library import native_on, reference_backend
from quant_kernels.quantized import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def devices() -> list[object]:
    """CPU, and a GPU where there is one that the library serves."""
    found: list[object] = ["cpu"]
    if torch.cuda.is_available() and native_on("cuda"):
        found.append(pytest.param("cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    """Every device that the library serves."""
    if not native_on(request.param):
        pytest.skip("the library was not built")
    return str(request.param)


@pytest.fixture
def reference() -> Callable[..., object]:
    """Call a function, with its arguments, with every conversion in plain torch."""

    def call(function: Callable[..., object], *arguments: object, **options: object) -> object:
        with reference_backend():
            return function(*arguments, **options)

    return call


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, on the CPU."""
    return tensor.detach().cpu().contiguous().view(INTEGERS[tensor.dtype.itemsize])


@pytest.fixture
def same() -> Callable[[object, object], None]:
    """Assert that two tensors or quantized weights have the same bits; NaN payloads of dense tensors do not count."""

    def check(found: object, wanted: object) -> None:
        if isinstance(found, QuantizedTensor):
            assert isinstance(wanted, QuantizedTensor)
            assert found.key == wanted.key
            assert tuple(found.shape) == tuple(wanted.shape)
            for part in ("data", "scale", "second_scale"):
                first, second = getattr(found, part), getattr(wanted, part)
                assert (first is None) == (second is None), part
                if first is not None:
                    _same_tensor(first, second, part)
            return
        assert isinstance(found, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        _same_tensor(found, wanted, "tensor")

    return check


def _same_tensor(found: torch.Tensor, wanted: torch.Tensor, part: str) -> None:
    assert found.dtype == wanted.dtype, part
    assert found.shape == wanted.shape, part
    first, second = bits(found), bits(wanted)
    if found.dtype in (torch.float32, torch.float16, torch.bfloat16):
        both_nan = found.isnan().cpu() & wanted.isnan().cpu()
        first, second = first.masked_fill(both_nan, 0), second.masked_fill(both_nan, 0)
    if torch.equal(first, second):
        return
    wrong = (first != second).flatten().nonzero().flatten()
    shown = ", ".join(f"[{i}] {first.flatten()[i]} != {second.flatten()[i]}" for i in wrong[:4].tolist())
    pytest.fail(f"{part}: {len(wrong)} of {first.numel()} differ: {shown}")
