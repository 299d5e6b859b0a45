"""Whole ranks: every layer of one tensor-parallel rank quantized as a load does it, against its bandwidth limit.

Synthetic weights on the device; a ring of layers stands for models that do not fit. One launch a layer and format.
Run: python tests/benchmarks/bench_headline.py [--json FILE]. Says so and stops where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from typing import TYPE_CHECKING

from gpu_timing import copy_ceiling, settle

import quant_kernels as qk
from quant_kernels.library import native_on

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Part:
    """Weights of one layer that become one format: shapes, and whether the source is FP8 in 128 x 128 blocks."""

    shapes: tuple[tuple[int, ...], ...]
    target: str
    from_fp8: bool = False


@dataclass(frozen=True)
class Rank:
    """One rank's job: layers, the parts of one layer, resident layers, and the ratios to reach."""

    name: str
    layers: int
    parts: tuple[Part, ...]
    ring: int
    least: float
    aim: float


RANKS = (
    # hidden 2048, 32 query and 4 key heads of 128, 128 experts of 768, over 4 ranks
    Rank("Qwen3-30B-A3B tp4 -> PTPC", 48, (
        Part(((1280, 2048), (2048, 1024), (128, 384, 2048), (128, 2048, 192)), "ptpc_fp8"),
    ), 12, 1.12, 1.08),
    # hidden 4096, 64 query and 4 key heads of 128, 128 experts of 1536, over 2 ranks
    Rank("Qwen3-235B-A22B tp2 -> MXFP4", 94, (
        Part(((4608, 4096), (4096, 4096), (128, 1536, 4096), (128, 4096, 768)), "mxfp4"),
    ), 6, 1.14, 1.08),
    # hidden 7168, 256 experts of 2048, over 8 ranks; MoE layers only
    Rank("DeepSeek-R1 tp8 block FP8 -> PTPC + MXFP4", 58, (
        Part(
            ((2112, 7168), (3072, 1536), (4096, 512), (7168, 2048), (512, 7168), (7168, 256)),
            "ptpc_fp8", from_fp8=True,
        ),
        Part(((256, 512, 7168), (256, 7168, 256)), "mxfp4", from_fp8=True),
    ), 6, 1.75, 1.2),
)  # fmt: skip


def layer(rank: Rank) -> tuple[Callable[[], None], int]:
    """Make the weights and destinations of one layer; return its conversion and its bytes."""
    steps: list[Callable[[], object]] = []
    nbytes = 0
    for part in rank.parts:
        weights = [torch.empty(shape, dtype=BF16, device="cuda").normal_(0, 0.02) for shape in part.shapes]
        if part.from_fp8:
            sources = [qk.quantize(weight, "per_block_fp8") for weight in weights]
            outs = [qk.quantize(weight, part.target) for weight in weights]
            del weights
            nbytes += sum(q.nbytes + out.nbytes for q, out in zip(sources, outs, strict=True))
            steps.append(lambda s=sources, o=outs, t=part.target: qk.requantize_many(s, t, out=o))
        else:
            outs = qk.quantize_many(weights, part.target)
            nbytes += sum(weight.nbytes + out.nbytes for weight, out in zip(weights, outs, strict=True))
            steps.append(lambda w=weights, o=outs, t=part.target: qk.quantize_many(w, t, out=o))

    def convert() -> None:
        for step in steps:
            step()

    return convert, nbytes


def measure(rank: Rank, ceiling: float) -> dict[str, object]:
    """Time all layers of a rank, walking over the ring; the median of five passes."""
    made = [layer(rank) for _ in range(rank.ring)]
    converts = [convert for convert, _ in made]
    nbytes = made[0][1] * rank.layers
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def all_layers() -> None:
        for index in range(rank.layers):
            converts[index % rank.ring]()

    settle(all_layers)
    times, host = [], []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        all_layers()
        end.record()
        host.append(1000 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    milliseconds = sorted(times)[2]
    limit = nbytes / ceiling / 1e6
    return {
        "name": rank.name, "gigabytes": nbytes / 1e9, "limit_ms": limit, "event_ms": milliseconds,
        "host_ms": sorted(host)[2], "ratio": milliseconds / limit, "least": rank.least, "aim": rank.aim,
        "extra_bytes": torch.cuda.max_memory_allocated() - before,
    }  # fmt: skip


def main() -> None:
    """Measure every rank and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() and native_on("cuda")):
        print("no GPU that the library serves: nothing measured")
        return
    ceiling = copy_ceiling()
    results = []
    for rank in RANKS:
        results.append(measure(rank, ceiling))
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy_gigabytes_per_second": ceiling, "results": results}, indent=1))
    print(f"{torch.cuda.get_device_name()}: copy ceiling {ceiling:.0f} GB/s")
    for each in results:
        print(
            f"{each['name']:44} {each['gigabytes']:6.1f} GB limit {each['limit_ms']:6.2f} ms,"
            f" found {each['event_ms']:6.2f} ms"
            f" (host {each['host_ms']:6.2f}), ratio {each['ratio']:.3f} (at most {each['least']}, aim {each['aim']}),"
            f" extra memory {each['extra_bytes']} B"
        )


if __name__ == "__main__":
    main()
