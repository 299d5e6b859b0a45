"""The quantized linear product beside torch's own in bf16, for the layers of three models.

Run: python tests/benchmarks/bench_linear.py [--json FILE] [--only TEXT] [--batches 1,16] [--device cpu]

On a GPU: each graph walks over distinct weights that do not fit the cache, and is replayed. `limit` is the time that
the bytes of the weight (codes and scales) take at the rate at which the card reads memory, divided by the time found.
On a CPU: beside `dequantize` followed by torch's product.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import events, graph_microseconds

import quant_kernels as qk
from quant_spec import QuantKey

# Layers of one rank: Qwen3-30B-A3B tp4, Qwen3-235B-A22B tp2, DeepSeek-R1 tp8. Rows and columns of the weight.
SHAPES = {
    "30B qkv": (1280, 2048),
    "30B o": (2048, 1024),
    "30B expert gate_up": (384, 2048),
    "30B expert down": (2048, 192),
    "235B qkv": (4608, 4096),
    "235B o": (4096, 4096),
    "235B expert gate_up": (1536, 4096),
    "235B expert down": (4096, 768),
    "R1 q_b": (3072, 1536),
    "R1 o": (7168, 2048),
    "R1 dense gate_up": (4608, 7168),
    "R1 dense down": (7168, 2304),
    "R1 expert gate_up": (512, 7168),
    "R1 expert down": (7168, 256),
    "large": (16384, 7168),
}
KINDS = (("ptpc_fp8", "fp8_e4m3/per_token:dynamic"), ("ptpc_fp8", ""), ("mxfp4", ""), ("mxfp4", "mxfp4:dynamic"))
SMALL = {name: SHAPES[name] for name in ("30B qkv", "30B expert down", "235B expert down", "R1 q_b")}


@dataclass(frozen=True)
class Result:
    """One product, beside what it is compared with."""

    layer: str
    shape: tuple[int, int]
    batch: int
    kind: str
    microseconds: float
    other_microseconds: float
    ratio: float
    limit: float


def key_of(word: str) -> QuantKey | None:
    """Key of an activation."""
    return QuantKey.parse(word) if word else None


def copies(nbytes: float) -> int:
    """Distinct weights that one graph needs: four times the cache of an H200."""
    return max(4, min(600, int(-(-240_000_000 // nbytes))))


def read_ceiling() -> float:
    """Bytes read in a second, in GB/s, by a sum over 4.3 GB."""
    source = torch.ones(1 << 30, device="cuda")
    total = torch.empty((), device="cuda")
    for _ in range(3):
        torch.sum(source, out=total)
    return source.nbytes / events(lambda: torch.sum(source, out=total)) / 1e3


def on_gpu(layer: str, shape: tuple[int, int], batches: list[int], ceiling: float) -> list[Result]:
    """Time one layer at all batches."""
    n, k = shape
    count = copies(2 * n * k)
    dense = torch.empty(count, n, k, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    found = []
    for batch in batches:
        x = torch.randn(batch, k, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(batch, n, dtype=torch.bfloat16, device="cuda")
        plain = graph_microseconds([functools.partial(torch.nn.functional.linear, x, w) for w in dense], 9)
        for name, word in KINDS:
            first = qk.quantize(dense[0], name)
            number = copies(first.nbytes)
            data, scale = (t.view(torch.uint8).repeat(number, 1, 1).view(t.dtype) for t in (first.data, first.scale))
            qs = [qk.QuantizedTensor(d, s, first.key, shape) for d, s in zip(data, scale, strict=True)]
            key = key_of(word)
            calls = [functools.partial(qk.linear, x, q, activation=key, out=out) for q in qs]
            took = graph_microseconds(calls, 9)
            limit = first.nbytes / ceiling / 1e3 / took
            found.append(Result(layer, shape, batch, f"{name} {word or 'as it is'}", took, plain, plain / took, limit))
    return found


def on_cpu(layer: str, shape: tuple[int, int], batches: list[int], _ceiling: float) -> list[Result]:
    """Time one layer at all batches, beside dequantize and torch's product."""
    found = []
    for batch in batches:
        for name, _ in (KINDS[1], KINDS[2]):
            for dtype in (torch.float32, torch.bfloat16):
                q = qk.quantize(torch.randn(shape, dtype=dtype), name)
                x = torch.randn(batch, shape[1], dtype=dtype)
                ours = functools.partial(qk.linear, x, q)
                other = lambda x=x, q=q: torch.nn.functional.linear(x, qk.dequantize(q, x.dtype))  # noqa: E731
                times = [[], []]
                for _ in range(15):  # in turn, so that both meet the same machine
                    for index, call in enumerate((ours, other)):
                        start = time.perf_counter()
                        call()
                        times[index].append(1e6 * (time.perf_counter() - start))
                took, plain = (sorted(seen)[len(seen) // 2] for seen in times)
                kind = f"{name} {str(dtype).removeprefix('torch.')}"
                found.append(Result(layer, shape, batch, kind, took, plain, plain / took, 0.0))
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="layers whose name contains this text")
    parser.add_argument("--batches", default="1,4,8,16,64,256")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    ceiling = read_ceiling() if gpu else 0.0
    batches = [int(text) for text in options.batches.split(",")]
    results: list[Result] = []
    for layer, shape in (SHAPES if gpu else SMALL).items():
        if options.only in layer:
            results += (on_gpu if gpu else on_cpu)(
                layer, shape, batches if gpu else [b for b in batches if b <= 64], ceiling
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"ceiling": ceiling, "results": [asdict(r) for r in results]}, indent=1))
    other = "F.linear bf16" if gpu else "dequantize + F.linear"
    print(f"read ceiling {ceiling:.0f} GB/s" if gpu else "CPU: read the ratios")
    print(f"{'layer':20} {'batch':>5} {'weight, activation':38} {'us':>8} {other:>22} {'ratio':>6} {'limit':>6}")
    for r in results:
        took = f"{r.layer:20} {r.batch:5} {r.kind:38} {r.microseconds:8.2f} {r.other_microseconds:22.2f}"
        print(f"{took} {r.ratio:6.2f} {100 * r.limit:5.0f}%")


if __name__ == "__main__":
    main()
