"""Ranks that agree on magnitudes against ranks that gather the weight, over all GPUs of this host (NCCL), or gloo.

    python tests/benchmarks/bench_parallel.py [--ranks N] [--layers N] [--rounds N] [--json FILE]

For the shapes that the ranks of the seed models hold at this number of ranks (Qwen3-30B at 2 and 4, Qwen3-235B at 2
with its experts spread, at 4 and 8, DeepSeek-R1 at 8):

1. every weight and format: codes equal to those of the quantized whole, byte for byte; seconds and bytes of both ways;
2. some layers in one go, as `quantize_model` does them: rank 0 alone, all ranks at once without agreeing (at most 1.05
   of that), and all ranks agreeing (at most 1.1 of the second);
3. a rank that is killed in the middle: all others raise an error that names it, within the timeout.

Without GPUs the sides are divided by 4 and the processes share the cores, so that only the first part's bytes and the
third part mean anything. The table comes last; the status is 1 if anything differs or nobody was told.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_jobs import KILL_TIMEOUT, Rank, models_for

MOST_AT_ONCE, MOST_AGREEING = 1.05, 1.1


def work(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    """Be one rank: all parts but the last, which ends the group, write figures; the last writes an outcome a rank."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    here = Rank(rank, size, 1 if gpu else 4, options.rounds)
    models = models_for(size)
    found = {
        "weights": [line for model in models for line in here.equal_shards(model)],
        "jobs": [here.job(model, options.layers) for model in models],
    }
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(found))
    dist.barrier()
    if size > 1:
        outcome = here.killed(models[0], size - 1)
        Path(folder, f"killed-{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # the group is broken: tearing it down would wait for the dead rank


def show(found: dict[str, list[dict[str, object]]]) -> bool:
    """Print the table; return whether all is as it must be."""
    fine = True
    print(f"{'weight':54} {'format':8} {'agree':>10} {'bytes':>11} {'gather':>10} {'bytes':>14}")
    for each in found["weights"]:
        ratio = float(each["gather_seconds"]) / float(each["agree_seconds"])
        fine &= bool(each["equal"])
        print(
            f"{each['weight']!s:54} {each['format']!s:8} {float(each['agree_seconds']) * 1e3:7.2f} ms"
            f" {each['agree_bytes']:>11,} {float(each['gather_seconds']) * 1e3:7.2f} ms {each['gather_bytes']:>14,}"
            f" {ratio:6.1f} x  {'equal' if each['equal'] else 'DIFFERENT'}"
        )
    for each in found["jobs"]:
        alone, apart, together = (float(each[f"{word}_seconds"]) for word in ("alone", "apart", "together"))
        print(
            f"{each['model']}, {each['layers']} of {each['of']} layers: one rank alone {alone * 1e3:.1f} ms;"
            f" all at once {apart / alone:.3f} of it (at most {MOST_AT_ONCE}); agreeing {together / apart:.3f} of that"
            f" (at most {MOST_AGREEING}), {each['sent_bytes']:,} bytes a rank"
        )
    for each in found["killed"]:
        fine &= bool(each["named"]) and float(each["seconds"]) < KILL_TIMEOUT + 10
        print(f"a rank killed: rank {each['rank']} raised after {float(each['seconds']):.1f} s: {each['text']}")
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [context.Process(target=work, args=(rank, size, folder, options)) for rank in range(size)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        figures = Path(folder, "figures.json")
        if not figures.exists():
            message = "a rank failed before the figures were complete"
            raise SystemExit(message)
        found = json.loads(figures.read_text())
        outcomes = [(rank, Path(folder, f"killed-{rank}.json")) for rank in range(size - 1)]
        missing = {"seconds": 0.0, "text": "nothing: it hung or died", "named": False}
        found["killed"] = [
            {"rank": rank, **(json.loads(path.read_text()) if path.exists() else missing)} for rank, path in outcomes
        ]
    print(f"{size} ranks, {'NCCL' if gpus else 'gloo'}")
    fine = show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if not fine:
        message = "codes differ from those of the gathered weight, or a rank was not told which one was killed"
        raise SystemExit(message)


if __name__ == "__main__":
    main()
