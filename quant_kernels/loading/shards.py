"""The shards of a job: written one after the other, taken up where they are complete, and verified on request."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from quant_kernels.loading.sinks import ComparingSink, DifferenceError, FileSink
from quant_kernels.loading.steps import CopyStep
from quant_kernels.loading.transfer import SourceFiles, Transfer
from quant_kernels.loading.workers import Workers, worker_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from quant_kernels.loading.job import Job, Step
    from quant_kernels.loading.output import OutputFolder, Sums
    from quant_kernels.loading.shard_layout import ShardLayout


@attrs.frozen
class Verified:
    """What was read again and found to be right.

    Attributes:
        files: shards.
        tensors: tensors in them.
        nbytes: bytes of the shards.
    """

    files: int = 0
    tensors: int = 0
    nbytes: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts for a JSON document."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        """Return the line of the log."""
        return f"Verified {self.files:,} files, {self.tensors:,} tensors, {self.nbytes:,} bytes against the source"


class Progress(Protocol):
    """Told of progress, in bytes of the source."""

    def start(self, total: int) -> None:
        """Take the bytes of the whole job."""
        ...

    def advance(self, nbytes: int, name: str) -> None:
        """Take the bytes of a tensor that is done, and its name."""
        ...


class NoProgress:
    """Progress that nobody looks at."""

    def start(self, total: int) -> None:
        """Ignore the size of the job."""

    def advance(self, nbytes: int, name: str) -> None:
        """Ignore a tensor."""


class ShardWriter:
    """Writes and verifies the shards of a job that are this process's."""

    def __init__(
        self, job: Job, written: OutputFolder, files: Collection[str], progress: Progress, look: Callable[[], None]
    ) -> None:
        """Take the job and its place.

        Args:
            job: what is to be done.
            written: the folder to write.
            files: the shards of this process.
            progress: told of every tensor.
            look: called after every tensor; raises to give up.
        """
        self._job = job
        self._written = written
        self._layouts = [layout for layout in job.layouts if layout.file in files]
        self._progress = progress
        self._look = look

    def source_nbytes(self) -> int:
        """Return the bytes of the source that go into the shards of this process."""
        return sum(step.nbytes for layout in self._layouts for step in self._job.steps[layout.file])

    def write(self, *, measure: bool) -> None:
        """Write every shard that is not complete.

        Args:
            measure: also sum up the error of each layer.

        Raises:
            LoadError: a weight is bad, or a source file cannot be read or has changed.
            OSError: a shard cannot be written.
        """
        with self._workers(measure=measure) as (source, workers):
            for layout in self._layouts:
                steps = self._job.steps[layout.file]
                if layout.file in self._written.done:
                    for step in steps:
                        self._progress.advance(step.nbytes, layout.file)
                else:
                    self._write(steps, layout, source, workers)
                source.close_except(frozenset())

    @contextmanager
    def _workers(self, *, measure: bool) -> Iterator[tuple[SourceFiles, Workers]]:
        through = getattr(torch, self._job.survey.config.source_dtype)
        folder = self._job.survey.folder
        with SourceFiles(folder.path, folder.stamps) as source:

            def transfer(stopped: Callable[[], bool]) -> Transfer:
                rounding = self._job.scale_rounding
                return Transfer(source, scale_rounding=rounding, through=through, measure=measure, stopped=stopped)

            with Workers(worker_count(self._job), transfer) as workers:
                yield source, workers

    def _write(self, steps: Sequence[Step], layout: ShardLayout, source: SourceFiles, workers: Workers) -> None:
        layers: Sums = {}
        descriptor = self._written.begin_shard(layout)
        try:
            os.ftruncate(descriptor, layout.nbytes)
            sink = FileSink(descriptor)
            sink.write(memoryview(layout.header), 0)
            # Closed before the file is: no thread writes to it any more, whatever happens here.
            with closing(workers.run(steps, sink, layout.offsets)) as finished:
                for step, done in finished:
                    name = step.name if isinstance(step, CopyStep) else step.weight.name
                    if not isinstance(step, CopyStep) and done is not None:
                        sums = layers.get(step.layer, [0.0, 0.0, 0.0])
                        layers[step.layer] = [sums[0] + done.seconds, sums[1] + done.signal, sums[2] + done.noise]
                    self._progress.advance(step.nbytes, name)
                    self._look()
            source.check_unchanged()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._written.finish_shard(layout, layers)

    def verify(self) -> Verified:
        """Read the shards again and compare them with what the source gives, converted once more.

        Raises:
            DifferenceError: a shard holds other bytes; it is forgotten, and the same job writes it again.
            LoadError: a source file cannot be read or has changed.
            OSError: a shard cannot be read.
        """
        found = Verified()
        with self._workers(measure=False) as (source, workers):
            for layout in self._layouts:
                steps = self._job.steps[layout.file]
                try:
                    self._verify(steps, layout, workers)
                except DifferenceError:
                    self._written.drop_shard(layout)
                    raise
                source.check_unchanged()
                source.close_except(frozenset())
                found = Verified(found.files + 1, found.tensors + len(layout.offsets), found.nbytes + layout.nbytes)
        return found

    def _verify(self, steps: Sequence[Step], layout: ShardLayout, workers: Workers) -> None:
        descriptor = self._written.open_shard(layout)
        try:
            # What the system still has in memory would be compared with itself.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(descriptor).st_size
            if size != layout.nbytes:
                message = f"{layout.file}: {size} bytes, {layout.nbytes} were written"
                raise DifferenceError(message)
            sink = ComparingSink(descriptor, layout.file)
            sink.write(memoryview(layout.header), 0)
            with closing(workers.run(steps, sink, layout.offsets)) as finished:
                for step, _ in finished:
                    name = step.name if isinstance(step, CopyStep) else step.weight.name
                    self._progress.advance(step.nbytes, name)
                    self._look()
        finally:
            os.close(descriptor)
