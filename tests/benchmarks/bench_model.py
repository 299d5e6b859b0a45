"""quantize_model against a bare loop over the same kernels, and what each module costs on top of its kernel.

    python tests/benchmarks/bench_model.py [--device cpu|cuda] [--json FILE] [--rounds N]

The job is one rank of DeepSeek-R1 over 8 ranks, block FP8 to PTPC and MXFP4; on a CPU its sides are divided by 8 and
three layers stand for 58. Limits: the conversions of the job within 1.1 of the bare loop, and 50 µs a module on top of
calls of `quantize`, measured on modules so small that the kernel's work does not count. What deciding and reporting
take is given beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from quant_kernels import QuantizedTensor, quantize, quantize_model
from quant_kernels.conversion import requantize
from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*experts*": "mxfp4"}}
SOURCE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LINEARS = {"qkv_a": (2112, 7168), "q_b": (3072, 1536), "kv_b": (4096, 512), "o_proj": (7168, 2048)}
STACKS = {"w13_weight": (256, 512, 7168), "w2_weight": (256, 7168, 256)}
MOST_RATIO, MOST_MICROSECONDS = 1.1, 50.0
SMALL_MODULES = 2000


def block_source(shape: tuple[int, ...], device: str) -> QuantizedTensor:
    return quantize(torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02), "per_block_fp8")


class Layer(nn.Module):
    """One block: Linears and stacked experts that hold block FP8."""

    def __init__(self, device: str, shrink: int) -> None:
        super().__init__()
        for name, (n, k) in LINEARS.items():
            linear = nn.Linear(k // shrink, n // shrink, bias=False, device="meta")
            made = block_source((n // shrink, k // shrink), device)
            linear.weight = nn.Parameter(made.data, requires_grad=False)
            linear.register_buffer("weight_scale_inv", made.scale)
            self.add_module(name, linear)
        self.experts = nn.Module()
        for name, (e, n, k) in STACKS.items():
            made = block_source((e // shrink, n // shrink * 2, k // shrink), device)
            self.experts.register_parameter(name, nn.Parameter(made.data, requires_grad=False))
            self.experts.register_buffer(f"{name}_scale_inv", made.scale)


def bare(model: nn.Module) -> None:
    """Convert every weight by itself, with nothing around the kernels but the check."""
    kept = []
    for layer in model:
        for name in LINEARS:
            linear = getattr(layer, name)
            kept.append(_requantized(linear, "weight", "ptpc_fp8"))
        kept += [_requantized(layer.experts, name, "mxfp4") for name in STACKS]


def _requantized(owner: nn.Module, name: str, target: str) -> QuantizedTensor:
    data, scale = getattr(owner, name).detach(), getattr(owner, f"{name}_scale_inv")
    return requantize(data, scale, source="fp8_e4m3/block_128x128", target=target, check=True)


def seconds(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def whole_job(device: str, rounds: int) -> dict[str, float]:
    """Time both ways in turn, on fresh models of the same values."""
    shrink, layers = (1, 4) if device == "cuda" else (8, 3)
    config = QuantizationConfig.from_online(REQUEST, source=QuantizationConfig.from_dict(SOURCE))
    bare_times, model_times, converting = [], [], []
    for _ in range(rounds + 1):
        model = nn.ModuleList(Layer(device, shrink) for _ in range(layers))
        bare_times.append(seconds(lambda model=model: bare(model), device))
        started = time.perf_counter()
        converting.append(quantize_model(model, config, write_report=False).elapsed_seconds)
        model_times.append(time.perf_counter() - started)
    loop, whole, converted = (statistics.median(each[1:]) for each in (bare_times, model_times, converting))
    return {
        "bare_loop_seconds": loop,
        "conversion_seconds": converted,
        "quantize_model_seconds": whole,
        "ratio": converted / loop,
    }


def overhead(device: str, rounds: int) -> dict[str, float]:
    """Return what a module costs on top of one call of `quantize` for its weight."""
    spent = []
    for _ in range(rounds + 1):
        model = nn.ModuleList(
            nn.Linear(32, 32, bias=False, dtype=torch.bfloat16, device=device) for _ in range(SMALL_MODULES)
        )
        weights = [linear.weight.detach() for linear in model]
        loop = seconds(lambda weights=weights: [quantize(w, "mxfp8", check=True) for w in weights], device)
        started = time.perf_counter()
        report = quantize_model(model, {"global_quant_config": "mxfp8"}, write_report=False)
        spent.append((loop, report.elapsed_seconds, time.perf_counter() - started))
    loop, converted, whole = (statistics.median(each) for each in zip(*spent[1:], strict=True))
    return {
        "quantize_call_us": loop / SMALL_MODULES * 1e6,
        "overhead_us": (converted - loop) / SMALL_MODULES * 1e6,
        "deciding_and_reporting_us": (whole - converted) / SMALL_MODULES * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    job, module = whole_job(options.device, options.rounds), overhead(options.device, options.rounds)
    print(
        f"R1 rank job on {options.device}: bare loop {job['bare_loop_seconds'] * 1e3:.1f} ms, conversions"
        f" {job['conversion_seconds'] * 1e3:.1f} ms, ratio {job['ratio']:.3f} (at most {MOST_RATIO}); all of"
        f" quantize_model {job['quantize_model_seconds'] * 1e3:.1f} ms"
    )
    print(
        f"a small module: {module['quantize_call_us']:.1f} µs for quantize alone, {module['overhead_us']:.1f} µs on top"
        f" (at most {MOST_MICROSECONDS:.0f}), {module['deciding_and_reporting_us']:.1f} µs to decide and report"
    )
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "job": job, "module": module}, indent=2) + "\n")


if __name__ == "__main__":
    main()
