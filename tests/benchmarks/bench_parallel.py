"""Agreeing on magnitudes against gathering the weight, over all GPUs of this host (NCCL), or two processes (gloo).

    python tests/benchmarks/bench_parallel.py [--ranks N] [--json FILE] [--rounds N]

For weights cut along the input side: seconds of `quantize_shard`, and of gathering the whole weight, quantizing it and
cutting the result, in the same run; bytes that each rank sends. The results are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from quant_kernels import quantize, quantize_shard
from quant_kernels.loading.distributed import ProcessRanks

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {
    "Qwen3-235B w2 [128, 4096, 1536]": (128, 4096, 1536),
    "Qwen3-235B o_proj [4096, 8192]": (4096, 8192),
    "DeepSeek-R1 o_proj [7168, 16384]": (7168, 16384),
}
SMALL_SHAPES = {"w2, a 16th [32, 1024, 1536]": (32, 1024, 1536), "o_proj [4096, 1024]": (4096, 1024)}
FORMATS = ("ptpc_fp8", "nvfp4", "mxfp4")


def median_seconds(function: Callable[[], object], rounds: int, device: torch.device) -> float:
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def gathered(shard: torch.Tensor, name: str, ranks: ProcessRanks) -> torch.Tensor:
    """Quantize the whole weight on every rank and return the codes of this rank's columns."""
    parts = [torch.empty_like(shard) for _ in range(ranks.size)]
    dist.all_gather(parts, shard)
    whole = quantize(torch.cat(parts, dim=-1), name)
    return whole.data.view(torch.uint8).chunk(ranks.size, dim=-1)[ranks.rank].contiguous()


def work(rank: int, size: int, folder: str, rounds: int) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = ProcessRanks(dist.group.WORLD)
    found = []
    for label, shape in (SHAPES if gpu else SMALL_SHAPES).items():
        local = (*shape[:-1], shape[-1] // size)
        generator = torch.Generator(device).manual_seed(rank)
        shard = torch.randn(local, generator=generator, device=device).mul_(0.02).bfloat16()
        for name in FORMATS:
            before = ranks.sent_bytes
            made = quantize_shard(shard, name, parallel="row", group=ranks)
            sent = ranks.sent_bytes - before
            same = torch.equal(made.data.view(torch.uint8), gathered(shard, name, ranks))
            ours = median_seconds(partial(quantize_shard, shard, name, parallel="row", group=ranks), rounds, device)
            peer = median_seconds(partial(gathered, shard, name, ranks), rounds, device)
            found.append(
                {
                    "weight": label,
                    "format": name,
                    "equal": same,
                    "agree_seconds": ours,
                    "gather_seconds": peer,
                    "agree_bytes": sent,
                    "gather_bytes": shard.nbytes * (size - 1),
                }
            )
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(options.ranks, folder, options.rounds), nprocs=options.ranks)
        found = json.loads(Path(folder, "figures.json").read_text())
    print(f"{options.ranks} ranks, {'NCCL' if gpus else 'gloo'}")
    for each in found:
        ratio = each["gather_seconds"] / each["agree_seconds"]
        print(
            f"{each['weight']:34} {each['format']:9}"
            f" agree {each['agree_seconds'] * 1e3:8.2f} ms {each['agree_bytes']:>10,} B"
            f"  gather {each['gather_seconds'] * 1e3:8.2f} ms {each['gather_bytes']:>14,} B"
            f"  {ratio:.1f} x  {'equal' if each['equal'] else 'DIFFERENT'}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if not all(each["equal"] for each in found):
        message = "the ranks' codes differ from those of the gathered weight"
        raise SystemExit(message)


if __name__ == "__main__":
    main()
