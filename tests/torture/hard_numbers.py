"""Numbers that are hard to convert: every kind of row, from every source to every target, however the work is cut.

    python tests/torture/hard_numbers.py [--rounds N] [--seed N] [--device cpu|cuda]

A round draws a shape and fills weights, or codes and their scales, with zeros, subnormal, tiny and huge values, ties,
NaN and infinities. Each conversion must give the bits of the plain-torch reference; in checked mode it must raise when,
and only when, a value is not finite or a scale is negative or NaN, and name the first bad rows. The results must not
depend on the number of threads, on how rows are cut into calls, or on the run. The last line gives the counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch

import quant_kernels as qk
from quant_kernels.checks import NonFiniteError
from quant_kernels.encodings import encode_source
from quant_kernels.launch import decode
from quant_kernels.library import reference_backend
from quant_spec import QuantKey, get_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
ROUNDED = [(name, rounding) for name in FORMATS for rounding in (get_format(name).scale_roundings or (None,))]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHOWN = 5
SPOILED = ("nan", "inf", "-inf")


@dataclass
class Counts:
    """What was done.

    Attributes:
        converted: conversions compared with the reference.
        refused: checked conversions that raised, as they had to.
        passed: checked conversions that did not.
        repeated: results compared across threads, cuts and runs.
    """

    converted: int = 0
    refused: int = 0
    passed: int = 0
    repeated: int = 0
    seeds: list[int] = field(default_factory=list)


def rows_of(kind: str, shape: Sequence[int], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Return rows [N, K] of one kind."""
    limits = torch.finfo(dtype)
    normal = torch.randn(*shape, generator=random)
    signs = normal.sign()
    values: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: normal,
        "zero": lambda: normal * 0,
        "minus zero": lambda: torch.full(tuple(shape), -0.0),
        "subnormal": lambda: normal * limits.smallest_normal / 8,
        "least": lambda: signs * limits.smallest_normal,
        "tiny": lambda: normal * 2.0**-130,
        "huge": lambda: signs * limits.max,
        "large": lambda: (normal * limits.max / 4).clamp(limits.min, limits.max),
        "spread": lambda: normal * torch.exp2(torch.randint(-40, 16, tuple(shape), generator=random).float()),
        "outlier": lambda: torch.where(torch.rand(*shape, generator=random) < 0.02, normal * 1e4, normal),
        "ties": lambda: torch.randint(-28, 29, tuple(shape), generator=random).float() / 4,
    }
    return values[kind]().to(dtype)


KINDS = (
    "normal", "zero", "minus zero", "subnormal", "least", "tiny", "huge", "large", "spread", "outlier", "ties",
)  # fmt: skip


def weight_of(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator, *, spoiled: bool) -> torch.Tensor:
    """Return a weight whose rows are of every kind, some with NaN and infinities if `spoiled`."""
    rows, k = torch.Size(shape[:-1]).numel(), shape[-1]
    picked = torch.randint(len(KINDS), (rows,), generator=random)
    weight = torch.empty(rows, k, dtype=dtype)
    for index, kind in enumerate(KINDS):
        chosen = (picked == index).nonzero().flatten()
        weight[chosen] = rows_of(kind, (len(chosen), k), dtype, random)
    if spoiled:
        for value in SPOILED:
            places = torch.randint(rows * k, (2,), generator=random)
            weight.view(-1)[places] = float(value)
    return weight.view(shape)


def scales_of(shape: Sequence[int], random: torch.Generator, *, spoiled: bool) -> torch.Tensor:
    """Return fp32 scales of all sizes; negative and NaN ones too if `spoiled`."""
    scale = torch.rand(*shape, generator=random) * torch.exp2(
        torch.randint(-60, 30, tuple(shape), generator=random).float()
    )
    flat = scale.view(-1)
    odd = [0.0, 2.0**-149, 2.0**-126, 3e38] + ([float("nan"), -1.0, float("inf")] if spoiled else [])
    for value in odd:
        flat[torch.randint(flat.numel(), (1,), generator=random)] = value
    return scale


def encoded_sources(shape: tuple[int, ...], random: torch.Generator, *, spoiled: bool) -> Iterator[dict[str, Any]]:
    """Yield arguments of `requantize`: codes of every pattern (NaN only if `spoiled`) under scales of all sizes."""
    *lead, n, k = shape
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    if not spoiled:
        codes = codes.masked_fill((codes & 127) == 127, 0x7E)
    fp8 = codes.view(torch.float8_e4m3fn)
    down, across = -(-n // 128), -(-k // 128)
    byte = torch.randint(0, 256 if spoiled else 255, (*lead, n, k // 32), generator=random, dtype=torch.uint8)
    blocks = torch.randint(60, 256 if spoiled else 180, (*lead, down, across), generator=random, dtype=torch.uint8)
    yield {"data": fp8, "scale": scales_of((1,), random, spoiled=False), "source": "fp8_e4m3/per_tensor"}
    yield {"data": fp8, "scale": scales_of((*lead, n, 1), random, spoiled=spoiled), "source": "fp8_e4m3/per_channel"}
    yield {
        "data": fp8,
        "scale": scales_of((*lead, down, across), random, spoiled=spoiled),
        "source": "fp8_e4m3/block_128x128",
    }
    yield {"data": fp8, "scale": blocks, "source": "fp8_e4m3/block_128x128"}
    yield {
        "data": fp8,
        "scale": scales_of((*lead, n, across), random, spoiled=spoiled),
        "source": "fp8_e4m3/block_1x128",
    }
    yield {"data": fp8, "scale": byte, "source": "mxfp8"}
    yield {"data": codes[..., : k // 2].contiguous(), "scale": byte, "source": "mxfp4"}
    second = torch.rand(lead, generator=random) + 0.1
    scale = torch.randint(0, 256 if spoiled else 127, (*lead, n, k // 16), generator=random, dtype=torch.uint8)
    yield {
        "data": codes[..., : k // 2].contiguous(), "scale": scale.view(torch.float8_e4m3fn), "source": "nvfp4",
        "second_scale": second,
    }  # fmt: skip
    yield {
        "data": codes.masked_fill(codes == 0x80, 0 if not spoiled else 0x80).view(torch.float8_e4m3fnuz),
        "scale": scales_of((*lead, n, 1), random, spoiled=spoiled), "source": "fp8_e4m3fnuz/per_channel",
    }  # fmt: skip


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; all NaN of a dense one as one NaN."""
    if tensor.dtype in DTYPES:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(found: qk.QuantizedTensor, wanted: qk.QuantizedTensor, about: object) -> None:
    """Compare two quantized weights, bit for bit.

    Raises:
        AssertionError: they differ.
    """
    for part in ("data", "scale", "second_scale"):
        first, second = getattr(found, part), getattr(wanted, part)
        assert (first is None) == (second is None), (about, part)
        assert first is None or torch.equal(raw(first), raw(second)), (about, part)


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with their tensors on a device."""
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}


@dataclass(frozen=True)
class Case:
    """One source of a round.

    Attributes:
        about: what a failure is told of.
        call: quantizes or re-quantizes; takes arguments, `target` and options.
        arguments: the source, on the CPU.
        dense: its values on their way, NaN where a checked conversion must take a scale for bad.
    """

    about: str
    call: Callable[..., qk.QuantizedTensor]
    arguments: dict[str, Any]
    dense: torch.Tensor

    def first_bad_rows(self) -> list[int]:
        """Return the first rows that a checked conversion has to name."""
        bad = (~self.dense.isfinite()).any(-1).flatten().nonzero().flatten()
        return [int(row) for row in bad[:SHOWN]]


def _quantize(w: torch.Tensor, target: str, **options: object) -> qk.QuantizedTensor:
    return qk.quantize(w, target, **options)


def cases(shape: tuple[int, ...], random: torch.Generator, *, spoiled: bool) -> Iterator[Case]:
    """Yield a source of every kind."""
    for dtype in DTYPES:
        weight = weight_of(shape, dtype, random, spoiled=spoiled)
        yield Case(f"{dtype} {shape}", _quantize, {"w": weight}, weight)
    for arguments in encoded_sources(shape, random, spoiled=spoiled):
        key = QuantKey.parse(arguments["source"])
        encoded = encode_source(arguments["data"], arguments["scale"], key, second_scale=arguments.get("second_scale"))
        for through in (torch.bfloat16, torch.float16):
            dense = decode(encoded, through, checked=True)
            about = f"{arguments['source']} {arguments['scale'].dtype} through {through} {shape}"
            yield Case(about, qk.requantize, {**arguments, "through": through}, dense)


def check_case(case: Case, device: str, counts: Counts) -> None:
    """Convert a source to every target, unchecked and checked."""
    moved, bad = on(device, case.arguments), case.first_bad_rows()
    for name, rounding in ROUNDED:
        for options in ({}, {"fnuz": True}) if name == "ptpc_fp8" else ({},):
            about = (case.about, name, rounding, options)
            with reference_backend():
                wanted = case.call(**case.arguments, target=name, scale_rounding=rounding, **options)
            same(case.call(**moved, target=name, scale_rounding=rounding, **options), wanted, about)
            counts.converted += 1
            try:
                checked = case.call(**moved, target=name, scale_rounding=rounding, check=True, **options)
            except NonFiniteError as error:
                assert bad, about
                assert list(error.rows) == bad, (about, error.rows, bad)  # noqa: PT017
                counts.refused += 1
            else:
                assert not bad, (about, bad)
                same(checked, wanted, about)
                counts.passed += 1


def check_dense(case: Case, device: str, counts: Counts) -> None:
    """Dequantize what a weight was quantized to."""
    if "w" not in case.arguments:
        return
    for name in FORMATS:
        q = qk.quantize(case.arguments["w"], name)
        moved = qk.QuantizedTensor(
            q.data.to(device), q.scale.to(device), q.key, q.shape,
            None if q.second_scale is None else q.second_scale.to(device),
        )  # fmt: skip
        for dtype in DTYPES:
            with reference_backend():
                wanted = qk.dequantize(q, dtype)
            assert torch.equal(raw(qk.dequantize(moved, dtype)), raw(wanted)), (case.about, name, dtype)
            counts.converted += 1


def check_cuts(weight: torch.Tensor, device: str, counts: Counts) -> None:
    """Convert a weight [N, K] with other numbers of threads, again, and in calls of some of its rows each."""
    moved, before = weight.to(device), torch.get_num_threads()
    for name in FORMATS:
        whole = qk.quantize(moved, name, measure=True)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                again = qk.quantize(moved, name, measure=True)
            finally:
                torch.set_num_threads(before)
            same(again, whole, (name, threads))
            assert torch.equal(raw(again.error_sums), raw(whole.error_sums)), (name, threads)
            counts.repeated += 1
        amax = qk.amax(moved, "tensor") if name == "nvfp4" else None
        for size in (128, 384):
            parts = [qk.quantize(part, name, amax=amax) for part in moved.split(size)]
            assert torch.equal(torch.cat([raw(part.data) for part in parts]), raw(whole.data)), (name, size)
            assert torch.equal(torch.cat([raw(part.scale) for part in parts]), raw(whole.scale)), (name, size)
            counts.repeated += 1


def one_round(seed: int, device: str, counts: Counts, *, least: int = 1, most: int = 200) -> None:
    """Draw a shape and check every source and target with it.

    Raises:
        AssertionError: a result is wrong; the message says of what, and the seed stands in the traceback.
    """
    random = torch.Generator().manual_seed(seed)
    n, groups, stacked = (int(torch.randint(least, high, (1,), generator=random)) for high in (most, 12, 3))
    shape = (2, n, 32 * groups) if stacked == 1 else (n, 32 * groups)
    for spoiled in (False, True):
        for case in cases(shape, random, spoiled=spoiled):
            check_case(case, device, counts)
            check_dense(case, device, counts)
    for dtype in DTYPES:
        check_cuts(weight_of((515, 32 * groups), dtype, random, spoiled=False), device, counts)
    counts.seeds.append(seed)


def main() -> int:
    """Run the rounds; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    counts, begin = Counts(), time.monotonic()
    for seed in range(options.seed, options.seed + options.rounds):
        one_round(seed, options.device, counts)
    told = {
        "conversions": counts.converted,
        "refused": counts.refused,
        "passed": counts.passed,
        "repeated": counts.repeated,
    }
    listed = ", ".join(starmap("{1:,} {0}".format, told.items()))
    seeds = f"seeds {options.seed} to {options.seed + options.rounds - 1}"
    print(f"{options.device}, {seeds}: {listed}; {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
