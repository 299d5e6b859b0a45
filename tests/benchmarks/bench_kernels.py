"""Each GPU conversion as a fraction of the copy ceiling of the same card in the same run.

Run: python tests/benchmarks/bench_kernels.py [--json FILE] [--only TEXT]. Says so and stops where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from typing import TYPE_CHECKING

from gpu_timing import copies_for, copy_ceiling, graph_microseconds

import quant_kernels as qk
from quant_kernels.library import native_on

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
W13_30B, W2_30B, W13_235B, W2_235B = (49152, 2048), (262144, 192), (196608, 4096), (524288, 768)
W13_R1, W2_R1, GATE_UP_R1, O_R1 = (131072, 7168), (1835008, 256), (4608, 7168), (7168, 2048)


@dataclass(frozen=True)
class Case:
    """A conversion: what it is called, its shape, the fractions to reach, and how its calls are made."""

    name: str
    shape: tuple[int, int]
    least: float
    aim: float
    make: Callable[[tuple[int, int]], tuple[Callable[[], object], int]]


@dataclass(frozen=True)
class Result:
    """A measured conversion."""

    name: str
    shape: tuple[int, int]
    microseconds: float
    gigabytes_per_second: float
    fraction: float
    least: float
    aim: float


def filled(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random weights of a layer's size."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(0, 0.02)


def quantizing(name: str, dtype: torch.dtype, **options: object) -> Callable[..., tuple[Callable[[], object], int]]:
    """Make calls of quantize with a destination of their own."""

    def make(shape: tuple[int, int]) -> tuple[Callable[[], object], int]:
        weight = filled(shape, dtype)
        out = qk.quantize(weight, name, **options)
        return (lambda: qk.quantize(weight, name, out=out, **options)), weight.nbytes + out.nbytes

    return make


def dequantizing(name: str) -> Callable[..., tuple[Callable[[], object], int]]:
    """Make calls of dequantize to bf16."""

    def make(shape: tuple[int, int]) -> tuple[Callable[[], object], int]:
        q = qk.quantize(filled(shape, BF16), name)
        out = torch.empty(shape, dtype=BF16, device="cuda")
        return (lambda: qk.dequantize(q, out=out)), q.nbytes + out.nbytes

    return make


def requantizing(target: str) -> Callable[..., tuple[Callable[[], object], int]]:
    """Make calls of requantize from FP8 in 128 x 128 blocks."""

    def make(shape: tuple[int, int]) -> tuple[Callable[[], object], int]:
        q = qk.quantize(filled(shape, BF16), "per_block_fp8")
        out = qk.requantize(q.data, q.scale, source=q.key, target=target)
        call = lambda: qk.requantize(q.data, q.scale, source=q.key, target=target, out=out)  # noqa: E731
        return call, q.nbytes + out.nbytes

    return make


CASES = (
    Case("bf16->ptpc", W13_30B, 0.96, 0.98, quantizing("ptpc_fp8", BF16)),
    Case("bf16->ptpc", W13_235B, 0.96, 0.98, quantizing("ptpc_fp8", BF16)),
    Case("bf16->ptpc", GATE_UP_R1, 0.88, 0.91, quantizing("ptpc_fp8", BF16)),
    Case("bf16->ptpc", (32768, 7168), 0.96, 0.98, quantizing("ptpc_fp8", BF16)),
    Case("bf16->ptpc K=192", W2_30B, 0.90, 0.93, quantizing("ptpc_fp8", BF16)),
    Case("fp16->ptpc", W13_30B, 0.96, 0.98, quantizing("ptpc_fp8", FP16)),
    Case("fp32->ptpc", W13_30B, 0.98, 1.00, quantizing("ptpc_fp8", FP32)),
    Case("bf16->mxfp4", W13_235B, 0.89, 0.95, quantizing("mxfp4", BF16)),
    Case("bf16->mxfp4 K=768", W2_235B, 0.82, 0.90, quantizing("mxfp4", BF16)),
    Case("bf16->mxfp4 cdna", W13_235B, 0.70, 0.85, quantizing("mxfp4", BF16, layout="cdna")),
    Case("fp16->mxfp4", W13_30B, 0.72, 0.90, quantizing("mxfp4", FP16)),
    Case("fp32->mxfp4", W13_30B, 0.94, 0.98, quantizing("mxfp4", FP32)),
    Case("bf16->mxfp8", W13_235B, 0.95, 0.98, quantizing("mxfp8", BF16)),
    Case("bf16->per_block_fp8", W13_30B, 0.90, 0.95, quantizing("per_block_fp8", BF16)),
    Case("bf16->nvfp4", W13_30B, 0.30, 0.50, quantizing("nvfp4", BF16)),
    Case("block fp8->bf16", W13_R1, 0.93, 0.94, dequantizing("per_block_fp8")),
    Case("block fp8->ptpc", W13_R1, 0.91, 0.95, requantizing("ptpc_fp8")),
    Case("block fp8->ptpc", O_R1, 0.65, 0.70, requantizing("ptpc_fp8")),
    Case("block fp8->mxfp4", W13_R1, 0.62, 0.85, requantizing("mxfp4")),
    Case("block fp8->mxfp4 K=256", W2_R1, 0.57, 0.80, requantizing("mxfp4")),
    Case("mxfp4->bf16", W13_30B, 0.89, 0.91, dequantizing("mxfp4")),
    Case("ptpc->bf16", W13_30B, 0.89, 0.91, dequantizing("ptpc_fp8")),
    Case("mxfp8->bf16", W13_30B, 0.89, 0.91, dequantizing("mxfp8")),
)


def checked_cost() -> dict[str, float]:
    """Cost of counting bad values and of error sums in the same pass: ratio of kernel times to the plain pass."""
    from quant_kernels.job import new_job
    from quant_kernels.launch import Outputs, new_bad_counter, run, sum_slots
    from quant_spec import get_format

    found = {}
    for name in ("ptpc_fp8", "mxfp4"):
        weight = filled(W13_235B, BF16)
        q = qk.quantize(weight, name)
        job = new_job(get_format(name), None, fnuz=False, layout="row_major", through=BF16)
        scale = q.scale.view(job.target.op_scale_dtype)
        bad = new_bad_counter(weight.device)
        sums = torch.zeros((sum_slots(W13_235B), 2), dtype=torch.float64, device="cuda")
        times = {}
        for label, counters in (("plain", {}), ("checked", {"bad": bad}), ("measured", {"sums": sums})):
            outputs = Outputs(q.data.view(job.op_data_dtype), scale, **counters)
            times[label] = graph_microseconds(
                [functools.partial(run, [(weight, outputs)], job.target, job.options)] * 2
            )
        for label in ("checked", "measured"):
            found[f"{name} {label}"] = times[label] / times["plain"]
    return found


def measure(case: Case, ceiling: float) -> Result:
    """Time a case over distinct buffers."""
    call, nbytes = case.make(case.shape)
    calls = [call, *(case.make(case.shape)[0] for _ in range(copies_for(nbytes) - 1))]
    microseconds = graph_microseconds(calls)
    rate = nbytes / microseconds / 1e3
    return Result(case.name, case.shape, microseconds, rate, rate / ceiling, case.least, case.aim)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() and native_on("cuda")):
        print("no GPU that the library serves: nothing measured")
        return
    ceiling = copy_ceiling()
    results = []
    for case in CASES:
        if arguments.only in case.name:
            results.append(measure(case, ceiling))
            torch.cuda.empty_cache()
    cost = checked_cost() if not arguments.only else {}
    if arguments.json:
        figures = {"device": torch.cuda.get_device_name(), "copy_gigabytes_per_second": ceiling, "cost": cost}
        arguments.json.write_text(json.dumps({**figures, "results": [asdict(each) for each in results]}, indent=1))
    print(f"{torch.cuda.get_device_name()}: copy ceiling {ceiling:.0f} GB/s; fractions of it: found (least / aim)")
    for each in results:
        mark = "  " if each.fraction >= each.aim else ("- " if each.fraction >= each.least else "! ")
        print(
            f"{mark}{each.name:24} {each.shape!s:16} {each.microseconds:9.1f} µs {each.gigabytes_per_second:6.0f} GB/s"
            f" {each.fraction:6.1%} ({each.least:.0%} / {each.aim:.0%})"
        )
    for name, ratio in cost.items():
        print(f"  {name}: {ratio - 1:+.1%}")


if __name__ == "__main__":
    main()
