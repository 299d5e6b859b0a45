"""Ranks as processes over gloo: the same results as one; what happens when one fails is in tests/torture."""

from __future__ import annotations

import multiprocessing as mp
from typing import TYPE_CHECKING

from gloo_jobs import process

if TYPE_CHECKING:
    from pathlib import Path


def run(size: int, folder: Path, *jobs: str) -> dict[tuple[str, int], tuple[float, str]]:
    """Run jobs on `size` processes; return seconds and what happened, by job and rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.device_mesh", "quant_kernels.loading.model"])
    processes = [context.Process(target=process, args=(rank, size, str(folder), list(jobs))) for rank in range(size)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
        assert each.exitcode is not None, "a rank hangs"
    found = {}
    for job in jobs:
        for rank in range(size):
            path = folder / f"{job}-{rank}"
            if path.exists():
                seconds, _, text = path.read_text().partition("\n")
                found[job, rank] = (float(seconds), text)
    return found


def test_shards_and_models_of_four_processes(tmp_path: Path) -> None:
    found = run(4, tmp_path, "shards_equal", "models_equal", "dtensors_refused", "other_config")
    for rank in range(4):
        assert found["shards_equal", rank][1] == "well"
        assert found["models_equal", rank][1] == "well"
        assert found["dtensors_refused", rank][1] == "well"
        assert "has another config or other options" in found["other_config", rank][1]
