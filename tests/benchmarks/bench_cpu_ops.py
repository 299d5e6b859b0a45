"""Host conversions against torch.compile of the plain composition, and against the machine's copy bandwidth.

Run: python tests/benchmarks/bench_cpu_ops.py [--json FILE] [--rows N]. Everything is timed in turns in one process, the
best of several passes each, so that other load on the machine strikes all alike.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import quant_kernels as qk
from quant_kernels.library import cpu_isa, native_on

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = 4096
PASSES = 7
COMPOSITION_TARGETS = {"ptpc_fp8": 2.0, "mxfp4": 4.0}
COPY_TARGETS = {"ptpc_fp8": 0.50, "mxfp8": 0.50, "mxfp4": 0.35}
DEQUANTIZE_TARGET = 0.50


def plain_ptpc(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PTPC as a user writes it in torch; inductor fuses it."""
    amax = weight.abs().amax(-1, keepdim=True).float()
    scale = torch.where(amax == 0, 1.0, amax / 448.0)
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def plain_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 as a user writes it in torch: exponent by bits, codes by comparison, packed; inductor fuses it."""
    groups = weight.float().reshape(weight.shape[0], -1, 32)
    amax = groups.abs().amax(-1, keepdim=True)
    byte = (((amax.view(torch.int32) + (1 << 21)) >> 23) - 2).clamp(min=0)
    size = groups * ((254 - byte) << 23).view(torch.float32)
    magnitude = size.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    code = code + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75)
    code = code + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0) + (size.signbit().to(torch.uint8) << 3)
    pairs = code.to(torch.uint8).reshape(weight.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), byte.to(torch.uint8)


def in_turns(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Best time of each function in seconds; one pass over all of them, then the next."""
    for function in functions.values():
        function()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(PASSES):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def conversions(weight: torch.Tensor) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the conversions of a weight with destinations of their own, and the bytes that each moves."""
    dense = torch.empty_like(weight)
    functions: dict[str, Callable[[], object]] = {"copy": lambda: dense.copy_(weight)}
    moved = {"copy": 2 * weight.nbytes}
    for name in ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"):
        q = qk.quantize(weight, name)
        functions[name] = lambda name=name, q=q: qk.quantize(weight, name, out=q)
        functions[f"{name} -> bf16"] = lambda q=q: qk.dequantize(q, out=dense)
        moved[name] = moved[f"{name} -> bf16"] = weight.nbytes + q.nbytes
    q = qk.quantize(weight, "per_block_fp8")
    out = qk.requantize(q.data, q.scale, source=q.key, target="ptpc_fp8")
    functions["block fp8 -> ptpc_fp8"] = lambda: qk.requantize(
        q.data, q.scale, source=q.key, target="ptpc_fp8", out=out
    )
    moved["block fp8 -> ptpc_fp8"] = q.nbytes + out.nbytes
    return functions, moved


def overhead_microseconds() -> float:
    """Time of one small call beyond its bytes."""
    small = torch.randn(32, 64).to(torch.bfloat16)

    def calls() -> None:
        for _ in range(500):
            qk.quantize(small, "ptpc_fp8")

    return in_turns({"small": calls})["small"] / 500 * 1e6


def main() -> None:
    """Measure, print ratios, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=16384)
    arguments = parser.parse_args()
    if not native_on("cpu"):
        print("no compiled library: nothing measured")
        return
    weight = torch.randn(arguments.rows, COLUMNS).to(torch.bfloat16)
    functions, moved = conversions(weight)
    compiled = {"ptpc_fp8": torch.compile(plain_ptpc), "mxfp4": torch.compile(plain_mxfp4)}
    for name, function in compiled.items():
        functions[f"compiled {name}"] = lambda function=function: function(weight)
    seconds = in_turns(functions)
    rates = {name: moved[name] / seconds[name] / 1e9 for name in moved}
    copy_ratios = {name: rate / rates["copy"] for name, rate in rates.items() if name != "copy"}
    compile_ratios = {name: seconds[f"compiled {name}"] / seconds[name] for name in compiled}
    overhead = overhead_microseconds()
    if arguments.json:
        figures = {"isa": cpu_isa(), "threads": torch.get_num_threads(), "gigabytes_per_second": rates}
        ratios = {"of_copy": copy_ratios, "to_compile": compile_ratios, "call_microseconds": overhead}
        arguments.json.write_text(json.dumps({**figures, **ratios}, indent=1))
    print(f"{cpu_isa()}, {torch.get_num_threads()} threads, bf16 {list(weight.shape)}; copy {rates['copy']:.1f} GB/s")
    for name, ratio in copy_ratios.items():
        least = DEQUANTIZE_TARGET if name.endswith("bf16") else COPY_TARGETS.get(name)
        print(
            f"  {name:24} {rates[name]:5.1f} GB/s, {ratio:4.0%} of copy" + (f" (at least {least:.0%})" if least else "")
        )
    for name, ratio in compile_ratios.items():
        print(f"  {name:24} {ratio:.1f} x torch.compile (at least {COMPOSITION_TARGETS[name]})")
    print(f"  one small call: {overhead:.1f} µs")


if __name__ == "__main__":
    main()
