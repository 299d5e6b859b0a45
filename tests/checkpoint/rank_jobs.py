"""What the processes of test_ranks.py do."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.ranks import Ranks
from quant_spec import QuantSpecError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue
    from pathlib import Path

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}


class Fault:
    """Progress that lets a process fail at its first tensor."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def start(self, total: int) -> None:
        assert total >= 0
        if self.kind == "slow":
            time.sleep(0.5)

    def advance(self, nbytes: int, name: str) -> None:
        assert nbytes >= 0
        assert name
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "interrupted":
            raise KeyboardInterrupt
        if self.kind == "disk":
            raise OSError(28, "No space left on device")


def work(
    rank: int, world: int, model: Path, output: Path, answers: SimpleQueue[Any], fault: str, timeout: float
) -> None:
    """Run one process of a job and put its answer into the queue."""
    request = {**REQUEST, "exclude_layer": []} if fault == "other request" else REQUEST
    started = time.monotonic()
    try:
        report = quantize_checkpoint(
            model,
            request,
            output,
            report_dir=output.parent / "reports",
            ranks=Ranks(rank, world, timeout),
            verify=fault == "verify",
            progress=Fault(fault),
        )
        answer = (rank, "", report.num_layers, report.bytes_after, str(report.saved_to))
    except (QuantSpecError, KeyboardInterrupt) as error:
        answer = (rank, str(error) or type(error).__name__, time.monotonic() - started, 0, "")
    answers.put(answer)
