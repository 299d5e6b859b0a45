"""Ranks that are killed, stall, run out of memory or hold another config, at every exchange of a job, over gloo.

    python tests/torture/ranks.py [--ranks N] [--rounds N] [--seed N] [--timeout SECONDS] [--at-once N]

A job quantizes a small model over some processes, in memory or streamed. One rank fails at one exchange; all others
must raise a LoadError that names it within the configured time, and every layer must be either untouched or quantized
in full. The last line gives the counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import attrs
import torch
import torch.distributed as dist
from torch import nn

from quant_kernels import OnlineQuantizer, quantize_model
from quant_kernels.loading import layer as layer_module
from quant_kernels.loading.distributed import ProcessRanks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

Fault: TypeAlias = Literal["killed", "stalled", "interrupted", "out of memory", "another config"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
Way: TypeAlias = Literal["in memory", "streamed"]
WAYS: tuple[Way, ...] = get_args(Way)
BLOCKS = 4
EXCHANGES = BLOCKS + 5
"""Exchanges of a job at least; some are one call for an in-memory job alone."""
SLACK = 4.0
"""Seconds beyond the timeout that a busy machine may take."""
PRELOAD = ["torch", "torch.distributed", "quant_kernels.loading.model", "quant_kernels.loading.streaming"]


@attrs.frozen
class Job:
    """One job and what goes wrong in it.

    Attributes:
        way: how the model is quantized.
        fault: what happens to the victim; None: nothing.
        at: index of the exchange, or of the layer's conversion, at which it happens.
        victim: the rank.
        ranks: number of ranks.
        timeout: seconds to wait for other ranks.
    """

    way: Way
    fault: Fault | None
    at: int
    victim: int
    ranks: int = 3
    timeout: float = 4.0


@attrs.frozen
class Outcome:
    """What became of one rank: seconds of the job, the error's class and text, whether all layers are whole."""

    seconds: float
    kind: str
    text: str
    consistent: bool


class Block(nn.Module):
    """One layer that takes a collective and one that does not."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up_proj = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16, device=device)
        self.down_proj = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16, device=device)
        self.up_proj.quant_parallel, self.down_proj.quant_parallel = "column", "row"


def new_model(device: str = "cpu") -> nn.Module:
    model = nn.ModuleList(Block(device) for _ in range(BLOCKS))
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # noqa: FBT003  (torch's)
    return model


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, torch.ones(parameter.shape, dtype=torch.bfloat16)


def is_consistent(model: nn.Module) -> bool:
    """Tell whether every layer holds its source (or nothing yet), or codes and scales."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        quantized = weight.dtype is torch.float8_e4m3fn
        scales = "weight_scale" in module._buffers and module._buffers["weight_scale"].shape == (weight.shape[0], 1)
        if quantized != scales or quantized != hasattr(module, "quant_type"):
            return False
    return True


class FaultyRanks(ProcessRanks):
    """Ranks of which one comes to harm at a certain exchange."""

    job: Job
    folder: str
    exchanges = 0

    def _harm(self) -> None:
        here = self.exchanges
        self.exchanges += 1
        if self.rank != self.job.victim or here != self.job.at:
            return
        if self.job.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job.fault == "stalled":
            others = [Path(self.folder, f"outcome-{rank}") for rank in range(self.size) if rank != self.rank]
            deadline = time.monotonic() + self.job.timeout + 2 * SLACK
            while time.monotonic() < deadline and not all(path.exists() for path in others):
                time.sleep(0.05)
            os._exit(0)
        if self.job.fault == "interrupted":
            raise KeyboardInterrupt

    def reduce_max(self, values: Tensor, what: str) -> Tensor:
        self._harm()
        return super().reduce_max(values, what)

    def gather(self, value: object, what: str) -> list[object]:
        self._harm()
        return super().gather(value, what)


def starve(at: int) -> None:
    """Let the conversion of the layer with this index fail for want of memory."""
    original = layer_module.convert_weights
    calls = iter(range(1_000_000))

    def starved(*given: object) -> object:
        if next(calls) == at:
            raise torch.OutOfMemoryError("no memory is left, says the test")
        return original(*given)

    layer_module.convert_weights = starved


def process(rank: int, folder: str, job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job.ranks)
    ranks = FaultyRanks(dist.group.WORLD, timeout=job.timeout)
    ranks.job, ranks.folder = job, folder
    victim = rank == job.victim
    if victim and job.fault == "out of memory":
        starve(job.at)
    request = {"global_quant_config": "ptpc_fp8"}
    if victim and job.fault == "another config":
        request["exclude_layer"] = ["0.up_proj"]
    model = new_model("cpu" if job.way == "in memory" else "meta")
    options = {"group": ranks, "report_dir": folder}
    started = time.perf_counter()
    kind = text = ""
    try:
        if job.way == "in memory":
            for name, tensor in tensors_of(model):
                model.get_parameter(name).copy_(tensor)
            quantize_model(model, request, **options)
        else:
            tensors = list(tensors_of(model))
            random.Random(rank).shuffle(tensors)  # noqa: S311  (an order, no secret)
            with OnlineQuantizer(model, request, **options) as quantizer:
                quantizer.load_all(tensors)
    except BaseException as error:  # noqa: BLE001  (told to the parent)
        kind, text = type(error).__name__, str(error)
    outcome = Outcome(time.perf_counter() - started, kind, text, is_consistent(model))
    Path(folder, f"outcome-{rank}").write_text(json.dumps(attrs.asdict(outcome)))
    os._exit(0)  # a broken group may not wait for others when it is torn down


def run(job: Job) -> dict[int, Outcome]:
    """Run a job; return the outcome of every rank that had one."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=process, args=(rank, folder, job)) for rank in range(job.ranks)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(120)
            if each.is_alive():
                each.kill()
                each.join()
        found = {}
        for rank in range(job.ranks):
            path = Path(folder, f"outcome-{rank}")
            if path.exists():
                found[rank] = Outcome(**json.loads(path.read_text()))
        return found


def complaints(job: Job, outcomes: dict[int, Outcome]) -> list[str]:
    """Return what is wrong with the outcomes of a job."""
    found = []
    for rank in range(job.ranks):
        if rank == job.victim and job.fault in ("killed", "stalled"):
            continue
        said = outcomes.get(rank)
        where = f"{job}: rank {rank}"
        if said is None:
            found.append(f"{where} hung or died")
            continue
        if not said.consistent:
            found.append(f"{where}: a layer is half done after {said.text}")
        if job.fault is None:
            found += [f"{where}: {said.kind}: {said.text}"] if said.kind else []
            continue
        if rank == job.victim:
            continue
        if said.kind != "LoadError":
            found.append(f"{where}: {said.kind or 'no error'}: {said.text}")
        elif f"rank {job.victim}" not in said.text:
            found.append(f"{where}: does not name rank {job.victim}: {said.text}")
        elif said.seconds > job.timeout + SLACK:
            found.append(f"{where}: took {said.seconds:.1f} s: {said.text}")
    return found


def run_all(jobs: Sequence[Job], at_once: int) -> list[str]:
    """Run jobs, some at once; return all complaints."""
    with ThreadPoolExecutor(at_once) as pool:
        return [line for job, found in zip(jobs, pool.map(run, jobs), strict=True) for line in complaints(job, found)]


def every_job(ranks: int, timeout: float, chance: random.Random) -> Iterator[Job]:
    """Yield one job for each way, fault and exchange, with a victim drawn for each."""
    for way in WAYS:
        yield Job(way, None, 0, -1, ranks, timeout)
        for fault in FAULTS:
            places = {"another config": 1, "out of memory": 2 * BLOCKS}.get(
                fault, EXCHANGES if way == "in memory" else EXCHANGES - 1
            )
            for at in range(places):
                yield Job(way, fault, at, chance.randrange(ranks), ranks, timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--at-once", type=int, default=3)
    options = parser.parse_args()
    chance = random.Random(options.seed)  # noqa: S311  (repeatable, no secret)
    jobs = [job for _ in range(options.rounds) for job in every_job(options.ranks, options.timeout, chance)]
    failures = run_all(jobs, options.at_once)
    counts = Counter(str(job.fault) for job in jobs)
    print(*failures, sep="\n")
    told = ", ".join(f"{fault} {count}" for fault, count in counts.items())
    print(f"ranks: seed {options.seed}, {len(jobs)} jobs of {options.ranks} processes ({told})")
    print(f"ranks: {len(failures)} complaints")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
