"""Self-test of a device: its conversions against the same in other arithmetic: all patterns, all scales.

A GPU's kernels (hardware conversions) are compared with the host's (integer arithmetic), the host's with plain torch.
What an operator runs once on new hardware; it takes seconds.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from quant_kernels.capability import capability
from quant_kernels.conversion import dequantize, quantize
from quant_kernels.library import native_on, reference_backend
from quant_kernels.quantized import QuantizedTensor
from quant_spec import QuantKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DTYPES: Final = (torch.bfloat16, torch.float16)
_GREATEST_EXPONENT: Final = {"mxfp4": 2, "mxfp8": 8}
_SHOWN: Final = 4


@dataclass(frozen=True)
class Comparison:
    """One conversion, compared.

    Attributes:
        name: conversion and source dtype.
        compared: bytes of codes (elements of a dequantized weight) that were compared.
        differing: how many differ.
        examples: the first few differences, as text.
    """

    name: str
    compared: int
    differing: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelfTestReport:
    """What `run` found.

    Attributes:
        device: device under test, with its name.
        against: what it was compared with.
        comparisons: one entry a conversion.
        seconds: time taken.
    """

    device: str
    against: str
    comparisons: tuple[Comparison, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if nothing differs."""
        return all(each.differing == 0 for each in self.comparisons)

    @property
    def verdict(self) -> str:
        """One line for people."""
        wrong = [each for each in self.comparisons if each.differing]
        total = sum(each.compared for each in self.comparisons)
        if not wrong:
            return f"{self.device}: all {total} results equal those of {self.against} ({self.seconds:.1f} s)"
        listed = ", ".join(f"{each.name} ({each.differing} of {each.compared})" for each in wrong)
        return f"{self.device}: DIFFERS from {self.against} in {listed}"


def run(
    device: torch.device | str | None = None, *, notify: Callable[[int, int, str], None] | None = None
) -> SelfTestReport:
    """Compare the conversions of `device` (default: the GPU if there is one that the library serves, else the CPU).

    Every bf16 and fp16 pattern is quantized under every power-of-two scale (MXFP4, MXFP8) and under scales of many
    sizes (PTPC in both variants, per block, NVFP4); every code is dequantized under every scale.

    Args:
        device: what to test.
        notify: called after each comparison with how many are done, how many there are, and its name.
    """
    if device is None:
        device = "cuda" if native_on("cuda") and torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    begin = time.perf_counter()
    comparisons: list[Comparison] = []
    conversions = (*_quantizers(), *_dequantizers())
    for name, function in conversions:
        comparisons.append(_compare(name, function, found))
        if notify is not None:
            notify(len(comparisons), len(conversions), name)
    known = capability(found)
    against = "plain torch" if found.type == "cpu" else "the host's integer arithmetic"
    seconds = time.perf_counter() - begin
    return SelfTestReport(f"{known.device} ({known.name}, {known.backend})", against, tuple(comparisons), seconds)


def _compare(name: str, function: Callable[[torch.device], Tensor], device: torch.device) -> Comparison:
    found = function(device).cpu()
    with reference_backend() if device.type == "cpu" else nullcontext():
        wanted = function(torch.device("cpu"))
    wrong = (found != wanted).flatten().nonzero().flatten()
    examples = tuple(
        f"[{index}] {int(found.flatten()[index]):#x}, not {int(wanted.flatten()[index]):#x}"
        for index in wrong[:_SHOWN].tolist()
    )
    return Comparison(name, found.numel(), len(wrong), examples)


def _patterns(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(-32768, 32768, device=device).to(torch.int16).view(dtype)


def _quantizers() -> Iterator[tuple[str, Callable[[torch.device], Tensor]]]:
    for dtype in _DTYPES:
        label = str(dtype).removeprefix("torch.")
        for name in ("mxfp4", "mxfp8"):
            yield f"{label} -> {name}", _every_scale(name, dtype)
        for name, fnuz in (("ptpc_fp8", False), ("ptpc_fp8", True), ("per_block_fp8", False), ("nvfp4", False)):
            yield f"{label} -> {name}{' fnuz' if fnuz else ''}", _many_scales(name, dtype, fnuz=fnuz)


def _every_scale(name: str, dtype: torch.dtype) -> Callable[[torch.device], Tensor]:
    """Codes of all patterns under all E8M0 scales: `floor` cuts the bytes out of given maxima."""

    def call(device: torch.device) -> Tensor:
        row = _patterns(dtype, device)
        exponents = torch.arange(_GREATEST_EXPONENT[name], 256, device=device, dtype=torch.int32)
        maxima = (exponents << 23).view(torch.float32)
        weight = row.expand(len(maxima), -1)
        amax = maxima.unsqueeze(1).expand(-1, row.numel() // 32)
        q = quantize(weight, name, scale_rounding="floor", amax=amax)
        return torch.cat((q.data.view(torch.uint8).flatten(), q.scale.view(torch.uint8).flatten()))

    return call


def _many_scales(name: str, dtype: torch.dtype, *, fnuz: bool) -> Callable[[torch.device], Tensor]:
    """Codes of all patterns under fp32 scales of every exponent and odd mantissas."""

    def call(device: torch.device) -> Tensor:
        row = _patterns(dtype, device)
        exponents = torch.arange(0, 255, 2, device=device, dtype=torch.int32)
        mantissas = (exponents * 2654435 + 12345) & 0x7FFFFF
        maxima = ((exponents << 23) | mantissas).view(torch.float32)
        if name == "ptpc_fp8":
            q = quantize(row.expand(len(maxima), -1), name, amax=maxima.unsqueeze(1), fnuz=fnuz)
        elif name == "nvfp4":
            q = quantize(row.expand(len(maxima), 1, -1), name, amax=maxima)
        else:
            amax = maxima[:, None, None].expand(-1, 1, row.numel() // 128)
            q = quantize(row.expand(len(maxima), 1, -1), name, amax=amax)
        return torch.cat((q.data.view(torch.uint8).flatten(), q.scale.view(torch.uint8).flatten()))

    return call


def _dequantizers() -> Iterator[tuple[str, Callable[[torch.device], Tensor]]]:
    for dtype in (*_DTYPES, torch.float32):
        label = str(dtype).removeprefix("torch.")
        for word in ("mxfp4", "mxfp8"):
            yield f"{word} -> {label}", _every_code(word, dtype)


def _every_code(word: str, dtype: torch.dtype) -> Callable[[torch.device], Tensor]:
    """All codes under all scales, as bits; NaN as one value."""

    def call(device: torch.device) -> Tensor:
        codes = torch.arange(256, device=device).to(torch.uint8).expand(256, 256).contiguous()
        element = torch.float4_e2m1fn_x2 if word == "mxfp4" else torch.float8_e4m3fn
        groups = (512 if word == "mxfp4" else 256) // 32
        scale = torch.arange(256, device=device).to(torch.uint8).unsqueeze(1).expand(-1, groups).contiguous()
        q = QuantizedTensor(
            codes.view(element), scale.view(torch.float8_e8m0fnu), QuantKey.parse(word), (256, groups * 32)
        )
        dense = dequantize(q, dtype)
        bits = dense.view(torch.int32 if dtype is torch.float32 else torch.int16).to(torch.int64)
        return torch.where(dense.isnan(), -1, bits)

    return call
