"""A few threads that carry out the steps of a file side by side: while one writes, another reads or converts.

Every step knows where its bytes go, so their order is free. Each thread runs kernels by itself: a piece is too small to
be worth waking other threads for.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

import torch

from quant_kernels.loading.steps import CopyStep, WeightStep
from quant_kernels.loading.storage import rows_per_step

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from types import TracebackType

    from quant_kernels.loading.job import Job, Step
    from quant_kernels.loading.sinks import Sink
    from quant_kernels.loading.transfer import Converted, Transfer

MAX_WORKERS: Final = 4
"""Threads, on a machine with as many processors."""
MAX_WHOLE_MATRIX_WORKERS: Final = 2
"""Threads of a job with formats that need a whole matrix in memory."""
_QUEUED: Final = 2
_BATCH_BYTES: Final = 1 << 20
_BATCH_STEPS: Final = 32


def worker_count(job: Job) -> int:
    """Return how many threads a job is worth: few enough that memory stays below three of its largest tensors."""
    each = (step for steps in job.steps.values() for step in steps)
    targets = {step.target.name: step.target for step in each if isinstance(step, WeightStep)}
    whole = any(rows_per_step(target) is None for target in targets.values())
    return max(1, min(MAX_WHOLE_MATRIX_WORKERS if whole else MAX_WORKERS, os.cpu_count() or 1))


class Workers:
    """Threads with a `Transfer` each; as a context, they are joined at its end."""

    def __init__(self, count: int, transfer: Callable[[Callable[[], bool]], Transfer]) -> None:
        """Take the number of threads and what makes the transfer of each from what tells whether to give up."""
        self._count = count
        self._stop = threading.Event()
        self._transfer = transfer
        self._own = threading.local()
        self._torch_threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(count, "quantize", self._start_thread)

    def _start_thread(self) -> None:
        torch.set_num_threads(1)
        self._own.transfer = self._transfer(self._stop.is_set)

    def __enter__(self) -> Workers:  # noqa: PYI034  (typing.Self needs Python 3.11)
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up the steps that have begun, between two pieces, and forget the others."""
        self._stop.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        # What a thread sets is also the default of threads to come.
        torch.set_num_threads(self._torch_threads)

    def run(
        self, steps: Sequence[Step], sink: Sink, offsets: Mapping[str, int]
    ) -> Generator[tuple[Step, Converted | None], None, None]:
        """Carry out the steps of one file; yield each with what it took when it is done.

        Args:
            steps: the steps.
            sink: what takes the bytes of that file.
            offsets: tensor name -> index of its first byte in it.

        Raises:
            LoadError, OSError: of the first step that failed; no step is running any more.
        """
        waiting = deque(_batches(steps))
        running: dict[Future[list[Converted | None]], list[Step]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._count * _QUEUED:
                    batch = waiting.popleft()
                    running[self._executor.submit(self._carry_out, batch, sink, offsets)] = batch
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from zip(running.pop(future), future.result(), strict=True)
        finally:
            if running:
                # Left before the end: whatever the reason, nothing more comes of these steps.
                self._stop.set()
                for future in running:
                    future.cancel()
                wait(running)
                self._stop.clear()

    def _carry_out(self, batch: Sequence[Step], sink: Sink, offsets: Mapping[str, int]) -> list[Converted | None]:
        transfer: Transfer = self._own.transfer
        found: list[Converted | None] = []
        for step in batch:
            if isinstance(step, CopyStep):
                transfer.copy(step.tensor, sink, offsets[step.name])
                found.append(None)
            else:
                found.append(transfer.convert(step, sink, offsets))
        return found


def _batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the steps in order, small ones together: handing one to a thread takes longer than converting it."""
    batch: list[Step] = []
    nbytes = 0
    for step in steps:
        batch.append(step)
        nbytes += step.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_STEPS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
