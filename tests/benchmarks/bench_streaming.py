"""OnlineQuantizer against plain copies of the same bytes to the device, and the memory that it takes.

    python tests/benchmarks/bench_streaming.py [--device cpu|cuda] [--layers N] [--threads N] [--pinned] [--json FILE]

On a GPU: bf16 weights in host memory, pageable or pinned (`--pinned`), stream to MXFP4 on the device; the limit is
0.9 of the rate at which the same number of bytes is copied from pinned memory, and peak device memory is at most the
quantized model, the largest layer's source and the staging budget. On a CPU nothing is copied: the figure is the rate
against `quantize` alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from quant_kernels import OnlineQuantizer, quantize

REQUEST = {"global_quant_config": "mxfp4"}
LEAST_RATE = 0.9
EXPERTS, INNER, HIDDEN = 16, 1536, 4096


class Experts(nn.Module):
    """Stacked experts on meta."""

    def __init__(self, shrink: int) -> None:
        super().__init__()
        inner, hidden = INNER // shrink, HIDDEN // shrink
        self.w13_weight = nn.Parameter(torch.empty(EXPERTS, 2 * inner, hidden, dtype=torch.bfloat16, device="meta"))
        self.w2_weight = nn.Parameter(torch.empty(EXPERTS, hidden, inner, dtype=torch.bfloat16, device="meta"))


def new_model(layers: int, shrink: int) -> nn.Module:
    return nn.ModuleList(nn.ModuleDict({"experts": Experts(shrink)}) for _ in range(layers))


def checkpoint(
    model: nn.Module, sources: dict[tuple[int, ...], torch.Tensor], *, pinned: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """Return one tensor an expert's projection, in checkpoint order; matrices of one shape share their memory."""
    found = []
    for name, parameter in model.named_parameters():
        container, _, leaf = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if leaf == "w13_weight" else ("down_proj",)
        shape = (parameter.shape[1] // len(leaves), parameter.shape[2])
        if shape not in sources:
            sources[shape] = torch.empty(shape, dtype=torch.bfloat16, pin_memory=pinned).normal_(0, 0.02)
        found += [(f"{container}.{e}.{each}.weight", sources[shape]) for e in range(EXPERTS) for each in leaves]
    return found


def stream(
    layers: int,
    shrink: int,
    device: str,
    threads: int,
    staging: int,
    pinned: bool,  # noqa: FBT001
) -> tuple[float, int, int]:
    """Return seconds, bytes read, and bytes of staging at most."""
    model = new_model(layers, shrink)
    tensors = checkpoint(model, {}, pinned=pinned)
    started = time.perf_counter()
    options = {"device": device, "staging_bytes": staging, "write_report": False}
    with OnlineQuantizer(model, REQUEST, **options) as quantizer:
        if threads == 1:
            quantizer.load_all(tensors)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda pair: quantizer.load(*pair), tensors))
    elapsed = time.perf_counter() - started
    return elapsed, sum(tensor.nbytes for _, tensor in tensors), quantizer.peak_staging_bytes


def pinned_rate(nbytes: int = 1 << 30) -> float:
    """Return the bytes a second of copies from pinned memory to the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return nbytes / statistics.median(times)


def kernel_rate(shrink: int) -> float:
    """Return the source bytes a second of `quantize` alone on the host."""
    weight = torch.empty(EXPERTS, 2 * INNER // shrink, HIDDEN // shrink, dtype=torch.bfloat16).normal_(0, 0.02)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        quantize(weight, "mxfp4", check=True)
        times.append(time.perf_counter() - started)
    return weight.nbytes / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pinned", action="store_true", help="give tensors in pinned memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu = options.device == "cuda"
    shrink, layers = (1, options.layers or 24) if gpu else (4, options.layers or 6)
    largest = EXPERTS * 3 * (INNER // shrink) * (HIDDEN // shrink) * 2
    staging = largest
    stream(2, shrink, options.device, options.threads, staging, options.pinned)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
    seconds, nbytes, held = stream(layers, shrink, options.device, options.threads, staging, options.pinned)
    rate = nbytes / seconds
    limit = pinned_rate() if gpu else kernel_rate(shrink)
    what = "pinned copies" if gpu else "quantize alone"
    print(
        f"{options.device}: {nbytes / 1e9:.2f} GB in {seconds:.2f} s = {rate / 1e9:.1f} GB/s;"
        f" {what} {limit / 1e9:.1f} GB/s; ratio {rate / limit:.2f} (at least {LEAST_RATE} on a GPU)"
    )
    print(f"staging: at most {held / 1e6:.0f} MB held, budget {staging / 1e6:.0f} MB beside one layer")
    found = {"device": options.device, "rate": rate, "limit": limit, "staging_peak": held, "bytes": nbytes}
    if gpu:
        quantized = layers * (largest // 4 + largest // 64)
        peak = torch.cuda.max_memory_allocated() - resident
        bound = quantized + largest + staging
        print(f"device memory: peak {peak / 1e6:.0f} MB, at most {bound / 1e6:.0f} MB allowed")
        found |= {"peak": peak, "bound": bound}
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
