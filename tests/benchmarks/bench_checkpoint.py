"""The checkpoint job against copying the same file, its memory, and `quant-spec plan` on 150,000 tensors.

    python tests/benchmarks/bench_checkpoint.py [--model DIR] [--json FILE] [--rounds N] [--large]

Without `--model`, the demo's SmolLM2-135M-Instruct if it has been built, else random weights of the same shapes.
Copying reads and writes every tensor with the reader and writer of the job itself; both are timed in turn, in one
process, on files in the page cache. Limits: conversion at most 3 x copying; peak memory at most that of the imports
plus 3 x the largest tensor; the plan under 2 seconds, process start included.

With `--large` also the peak memory of jobs of 1 and 8 GB, which must be the same, and those of 10,000 and 100,000
tensors in 100 and 1,000 files, whose difference is what a tensor takes in the job. The sources are holes; outputs take
2.3 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from quant_kernels.library import native_on
from quant_kernels.loading.checkpoint import JobOptions, carry_out
from quant_kernels.loading.folder import CheckpointFolder, open_folder
from quant_kernels.loading.sinks import FileSink
from quant_kernels.loading.survey import survey
from quant_kernels.loading.transfer import SourceFiles, Transfer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "build" / "demo" / "SmolLM2-135M-Instruct"
RECIPE = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
HIDDEN, INNER, VOCAB, KV, LAYERS = 576, 1536, 49152, 192, 30
PEAK = """
import sys
from quant_kernels.loading.checkpoint import quantize_checkpoint
import json, torch
from quant_kernels.library import load_library
load_library(); torch.ones(8) + 1
def peak():  # of this program alone; getrusage also knows what its parent had
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
before = peak()
quantize_checkpoint(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], write_report=False)
print(before, peak())
"""


def random_model(folder: Path) -> Path:
    """Write bf16 weights of SmolLM2-135M's shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV, HIDDEN),
            "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    return folder


def copy_seconds(folder: CheckpointFolder, target: Path) -> float:
    """Copy every tensor with the job's own reader and writer."""
    started = time.perf_counter()
    with SourceFiles(folder.path) as source:
        transfer = Transfer(source, scale_rounding=None, through=torch.bfloat16, measure=False)
        for shard in folder.shards:
            descriptor = os.open(target / f"{shard}.copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            sink = FileSink(descriptor)
            for tensor in folder.tensors.values():
                if tensor.file == shard:
                    transfer.copy(tensor, sink, tensor.start)
            os.close(descriptor)
    return time.perf_counter() - started


def conversion(model: Path, scratch: Path, rounds: int) -> dict[str, float]:
    """Time copying and converting in turn; the medians' ratio counts."""
    folder = open_folder(model)
    copies, jobs = [], []
    for number in range(rounds + 1):
        copied = copy_seconds(folder, scratch)
        output = scratch / f"out{number}"
        converted = carry_out(survey(folder, RECIPE), output, JobOptions(write_report=False)).elapsed_seconds
        if number:  # the first round warms up
            copies.append(copied)
            jobs.append(converted)
    copy, job = statistics.median(copies), statistics.median(jobs)
    return {
        "copy_seconds": copy,
        "job_seconds": job,
        "ratio": job / copy,
        "best_ratio": min(jobs) / min(copies),
        "source_bytes": folder.nbytes,
    }


def memory(model: Path, scratch: Path, request: object = RECIPE) -> dict[str, float]:
    """Measure the peak of a fresh process beyond its imports, in largest tensors."""
    command = [sys.executable, "-c", PEAK, str(model), json.dumps(request), str(scratch / "peak")]
    before, after = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    largest = max(tensor.nbytes for tensor in open_folder(model).tensors.values())
    return {
        "imports_bytes": before,
        "extra_bytes": after - before,
        "largest_tensor_bytes": largest,
        "extra_in_largest": (after - before) / largest,
    }


def large_index(folder: Path, shards: int = 1000, tensors: int = 150_000) -> Path:
    """Write headers of a DeepSeek-like model with 256 experts a layer; the data are holes."""
    names = []
    layer = 0
    while len(names) < tensors:
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")]
        names += [f"{prefix}.mlp.gate"]
        names += [
            f"{prefix}.mlp.experts.{e}.{leaf}" for e in range(256) for leaf in ("gate_proj", "up_proj", "down_proj")
        ]
        layer += 1
    folder.mkdir()
    weight_map = {}
    share = tensors // shards
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = [f"{name}.weight" for name in names[shard * share : (shard + 1) * share]]
        size = 64 * 64 * 2
        header = {
            name: {"dtype": "BF16", "shape": [64, 64], "data_offsets": [at * size, (at + 1) * size]}
            for at, name in enumerate(part)
        }
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + size * len(part))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    return folder


def holes(folder: Path, gigabytes: int) -> Path:
    """Write a checkpoint of [4096, 4096] bf16 weights, a file a gigabyte, whose data are holes."""
    folder.mkdir()
    weight_map = {}
    size = 4096 * 4096 * 2
    for shard in range(gigabytes):
        file = f"model-{shard + 1:05d}-of-{gigabytes:05d}.safetensors"
        names = [f"model.layers.{32 * shard + layer}.mlp.up_proj.weight" for layer in range((1 << 30) // size)]
        header = {
            name: {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [at * size, (at + 1) * size]}
            for at, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + size * len(names))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def large(scratch: Path) -> dict[str, float]:
    """Measure the peak memory of large jobs beyond the imports, in bytes, and the seconds that they take."""
    found: dict[str, float] = {}
    makers = {
        "1 GB": lambda folder: holes(folder, 1),
        "8 GB": lambda folder: holes(folder, 8),
        "10,000 tensors": lambda folder: large_index(folder, shards=100, tensors=10_000),
        "100,000 tensors": lambda folder: large_index(folder, shards=1000, tensors=100_000),
    }
    for number, (name, make) in enumerate(makers.items()):
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            model = make(Path(place, f"model{number}"))
            started = time.perf_counter()
            found[f"{name}: extra_bytes"] = memory(model, Path(place), request={"global_quant_config": "mxfp4"})[
                "extra_bytes"
            ]
            found[f"{name}: seconds"] = time.perf_counter() - started
    return found


def plan_seconds(folder: Path, rounds: int) -> dict[str, float]:
    """Time `quant-spec plan` as a process."""
    request = json.dumps({**RECIPE, "layer_quant_config": {"*.experts": "mxfp4"}})
    command = [sys.executable, "-m", "quant_kernels.cli", "plan", str(folder), "--online-quant-config", request]
    found, processor = [], []
    for _ in range(rounds):
        started, before = time.perf_counter(), children_seconds()
        subprocess.run(command, capture_output=True, check=True)
        found.append(time.perf_counter() - started)
        processor.append(children_seconds() - before)
    return {
        "plan_seconds": statistics.median(found),
        "plan_best_seconds": min(found),
        "plan_processor_seconds": min(processor),
    }


def children_seconds() -> float:
    """Processor seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the figures and, if asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="jobs of 8 GB and of 100,000 tensors too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = given.model or (DEMO if DEMO.is_dir() else random_model(scratch / "model"))
        figures: dict[str, object] = {"model": model.name, "native": native_on("cpu"), "cpus": os.cpu_count()}
        figures |= conversion(model, scratch, given.rounds)
        figures |= memory(model, scratch)
        figures |= plan_seconds(large_index(scratch / "large"), given.rounds)
        sizes = large(scratch) if given.large else {}
    print(f"copy        {figures['copy_seconds']:.3f} s")
    print(f"conversion  {figures['job_seconds']:.3f} s, {figures['ratio']:.2f} x the copy (limit 3)")
    print(f"peak memory imports + {figures['extra_in_largest']:.2f} x the largest tensor (limit 3)")
    print(
        f"plan        {figures['plan_seconds']:.2f} s for 150,000 tensors in 1,000 files (limit 2), "
        f"{figures['plan_processor_seconds']:.2f} s of processor time"
    )
    for name, value in sizes.items():
        print(f"{name:28} {value / (1 << 20):.1f} MiB" if name.endswith("bytes") else f"{name:28} {value:.1f} s")
    figures |= sizes
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
