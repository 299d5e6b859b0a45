"""Several processes write one checkpoint: the bytes of one, and an error in all when one fails."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import rank_jobs
import torch

from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.ranks import Ranks
from quant_kernels.loading.shard_layout import ShardLayout
from quant_spec import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conftest import Writer

PRELOAD = ["quant_kernels.loading.checkpoint", "safetensors.torch"]
TIMEOUT = 3.0
SLACK = 15.0
"""Seconds that a busy machine may take on top."""
Models = dict[str, "Callable[..., dict[str, torch.Tensor]]"]


@attrs.frozen
class Checkpoint:
    """A model and what one process makes of it."""

    model: Path
    expected: dict[str, bytes]

    @property
    def output(self) -> Path:
        return self.model.parent / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(write: Writer, models: Models) -> Checkpoint:
    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    model = write(models["qwen3_moe"](), shards=5)
    alone = model.parent / "alone"
    quantize_checkpoint(model, rank_jobs.REQUEST, alone, write_report=False)
    return Checkpoint(model, contents(alone))


def run(
    found: Checkpoint, world: int, faults: Mapping[int, str], *, timeout: float = TIMEOUT, absent: int | None = None
) -> dict[int, tuple[str, Any, int, str]]:
    """Start all processes but one, and return what each answered; one that was killed does not."""
    context = mp.get_context("forkserver")
    answers = context.SimpleQueue()
    started = {
        rank: context.Process(
            target=rank_jobs.work,
            args=(rank, world, found.model, found.output, answers, faults.get(rank, ""), timeout),
        )
        for rank in range(world)
        if rank != absent
    }
    for process in started.values():
        process.start()
    until = time.monotonic() + 3 * timeout + SLACK
    silent = [rank for rank, kind in faults.items() if kind in {"killed", "stopped"}]
    for rank, process in started.items():
        if rank not in silent:
            process.join(max(0.1, until - time.monotonic()))
    late = [rank for rank, process in started.items() if process.is_alive() and rank not in silent]
    for process in started.values():
        process.kill()
        process.join()
    assert not late
    told = {}
    while not answers.empty():
        rank, *rest = answers.get()
        told[rank] = tuple(rest)
    assert sorted(told) == [rank for rank in started if rank not in silent]
    return told  # type: ignore[return-value]


@pytest.mark.parametrize(("world", "fault"), [(2, "verify"), (3, "slow"), (6, "")])
def test_the_bytes_are_those_of_one_process(checkpoint: Checkpoint, world: int, fault: str) -> None:
    told = run(checkpoint, world, dict.fromkeys(range(0, world, 2), fault), timeout=30)
    assert [answer[0] for answer in told.values()] == [""] * world
    assert contents(checkpoint.output) == checkpoint.expected
    assert not checkpoint.output.with_name("out.partial").exists()
    (report,) = (checkpoint.output.parent / "reports").iterdir()
    document = json.loads(report.read_text())
    # Every process gives the whole report, and only rank 0 writes it.
    assert {answer[1:3] for answer in told.values()} == {(document["num_layers"], document["totals"]["bytes_after"])}
    assert [rank for rank, answer in told.items() if answer[3] == str(report)] == [0]


@pytest.mark.parametrize(
    ("victim", "fault"),
    [(0, "killed"), (1, "killed"), (1, "stopped"), (0, "interrupted"), (2, "interrupted"), (0, "disk"), (1, "disk")],
)
def test_a_rank_that_fails_is_an_error_in_all(checkpoint: Checkpoint, victim: int, fault: str) -> None:
    told = run(checkpoint, 3, {victim: fault})
    said = {
        "killed": f"rank {victim} has not been heard of for 3 s",
        "stopped": f"rank {victim} has not been heard of for 3 s",
        "interrupted": f"rank {victim}: interrupted",
        "disk": f"rank {victim}: ",
    }[fault]
    for rank, (message, seconds, *_) in told.items():
        if rank != victim:
            assert message.startswith(said), (rank, message)
            assert seconds < 2 * TIMEOUT + SLACK
    if fault == "disk":
        assert "No space left on device" in told[victim][0]
    assert not checkpoint.output.exists()
    # What was written stays, and any number of processes takes it up.
    quantize_checkpoint(checkpoint.model, rank_jobs.REQUEST, checkpoint.output, write_report=False)
    assert contents(checkpoint.output) == checkpoint.expected
    assert not checkpoint.output.with_name("out.partial").exists()


def test_another_request_is_refused_by_all(checkpoint: Checkpoint) -> None:
    told = run(checkpoint, 3, {2: "other request"})
    assert all("rank 2 does another job" in message for message, *_ in told.values())
    assert sorted(path.name for path in checkpoint.output.parent.iterdir()) == ["alone", "model"]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(checkpoint: Checkpoint, absent: int) -> None:
    told = run(checkpoint, 2, {}, timeout=1.0, absent=absent)
    (message,) = (answer[0] for answer in told.values())
    assert message.endswith("within 1 s")
    assert ("rank 0 has not made it" if absent == 0 else "ranks 1 of 2 have not come") in message
    assert sorted(path.name for path in checkpoint.output.parent.iterdir()) == ["alone", "model"]


def test_bad_values_on_one_rank_leave_nothing(write: Writer, models: Models) -> None:
    source = models["qwen3_moe"]()
    source["model.layers.1.self_attn.q_proj.weight"][3, 5] = torch.nan
    model = write(source, shards=5)
    told = run(Checkpoint(model, {}), 3, {})
    assert all("holds 1 NaN" in message for message, *_ in told.values())
    assert sorted(path.name for path in model.parent.iterdir()) == ["model"]


def test_shards_are_shared_by_size() -> None:
    layouts = [ShardLayout(f"{n}.safetensors", b"", {}, nbytes) for n, nbytes in enumerate([5, 1, 9, 4, 4, 7, 1])]
    for world in range(1, 10):
        shares = [Ranks(rank, world).share(layouts) for rank in range(world)]
        assert sorted(name for share in shares for name in share) == sorted(layout.file for layout in layouts)
        loads = [sum(layout.nbytes for layout in layouts if layout.file in share) for share in shares]
        assert max(loads) <= max(9, -(-31 // world) + 4)


@pytest.mark.parametrize(
    "text", ["", "1", "0/0", "2/2", "-1/2", "a/b", "1/2/3", "\u0661/\u0662", "0/1e3", "9" * 5000 + "/1"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(PlanError, match="ranks: found"):
        Ranks.parse(text)


@pytest.mark.parametrize("place", [(True, 2), (0, 2.0), (2, 2), (-1, 1)])
def test_what_is_no_rank(place: tuple[Any, Any]) -> None:
    with pytest.raises(PlanError, match="ranks: found"):
        Ranks(*place)


def test_environment_counts_under_torchrun_alone() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "4"}
    assert Ranks.from_environment(given) == Ranks()
    assert Ranks.from_environment({**given, "TORCHELASTIC_RUN_ID": "none"}) == Ranks(1, 4)
    with pytest.raises(PlanError):
        Ranks.from_environment({"TORCHELASTIC_RUN_ID": "none"})


def test_command_under_torchrun(checkpoint: Checkpoint) -> None:
    arguments = ["quantize", str(checkpoint.model), "--online-quant-config", json.dumps(rank_jobs.REQUEST)]
    arguments += ["--output", str(checkpoint.output), "--report-dir", str(checkpoint.output.parent / "reports")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    found = subprocess.run(
        [*launcher, "quant_kernels.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert contents(checkpoint.output) == checkpoint.expected
    assert "rank 1 of 2: its shards are written" in found.stderr
    assert found.stdout.count("Checkpoint written to") == 1


def test_sigterm_ends_the_job_in_order(checkpoint: Checkpoint, tmp_path: Path) -> None:
    # The second process never comes: the first waits for it until it is told to end.
    arguments = ["quantize", str(checkpoint.model), "--online-quant-config", json.dumps(rank_jobs.REQUEST)]
    arguments += ["--output", str(checkpoint.output), "--report-dir", str(tmp_path / "reports"), "--ranks", "0/2"]
    with subprocess.Popen(
        [sys.executable, "-m", "quant_kernels.cli", *arguments], stderr=subprocess.PIPE, text=True
    ) as started:
        partial = checkpoint.output.with_name("out.partial")
        until = time.monotonic() + 60
        while not (partial / "ranks" / "0.json").exists():
            assert time.monotonic() < until
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 143
    assert errors.strip().splitlines()[-1].startswith("terminated; ")
    assert "Traceback" not in errors
    assert not checkpoint.output.exists()
    shutil.rmtree(partial, ignore_errors=True)
