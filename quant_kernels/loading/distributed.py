"""Ranks: the few things that processes of one group say to each other, none of which can wait for ever.

Every exchange carries, beside its values, whether the sender is well. A rank that fails says so in the next exchange of
the common schedule, so that all ranks raise the same error; a rank that died shows as a broken or late exchange.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist

from quant_kernels.loading.presence import PATIENCE, Presence
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
DEFAULT_TIMEOUT: Final = 300.0
"""Seconds after which a rank that does not answer counts as dead."""


@runtime_checkable
class Ranks(Protocol):
    """A group of processes that quantize one model together.

    Attributes:
        rank: index of this process.
        size: number of processes.
        sent_bytes: bytes that this process has put into `reduce_max` so far.
    """

    rank: int
    size: int
    sent_bytes: int

    def reduce_max(self, values: Tensor, what: str) -> Tensor:
        """Return the element-wise greatest of a contiguous int32 tensor over the ranks.

        Args:
            values: same shape on all ranks; may be overwritten.
            what: what is agreed on, for the error.

        Raises:
            LoadError: a rank does not answer.
        """
        ...

    def gather(self, value: object, what: str) -> list[object]:
        """Return a picklable value of every rank, in order of rank.

        Raises:
            LoadError: a rank does not answer.
        """
        ...


class OneRank:
    """A process by itself."""

    rank = 0
    size = 1
    sent_bytes = 0

    def reduce_max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002  (the protocol's)
        """Return the values."""
        return values

    def gather(self, value: object, what: str) -> list[object]:  # noqa: ARG002  (the protocol's)
        """Return the value alone."""
        return [value]


class ProcessRanks:
    """The ranks of a `torch.distributed` group (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Take a group of which this process is a member.

        Args:
            group: the group.
            timeout: seconds to wait for the other ranks in any exchange.

        Raises:
            ValueError: this process is no member.
        """
        self._group = group
        self._timeout = dt.timedelta(seconds=timeout)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent_bytes = 0
        if self.rank < 0:
            message = "group: this process is no member of it"
            raise ValueError(message)
        backend = dist.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        self._presence = Presence(group, self.rank, self.size)

    def reduce_max(self, values: Tensor, what: str) -> Tensor:
        """As `Ranks.reduce_max`; one all-reduce of `values`."""
        self.sent_bytes += values.nbytes
        moved = values if values.device.type == self._device.type else values.to(self._device)
        self._finish(lambda: dist.all_reduce(moved, dist.ReduceOp.MAX, group=self._group, async_op=True), what)
        return moved if moved is values else moved.to(values.device)

    def gather(self, value: object, what: str) -> list[object]:
        """As `Ranks.gather`; an all-gather of the sizes, then one of the pickled values."""
        import pickle  # noqa: PLC0415  (never needed by a process alone)

        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        own = torch.tensor([payload.numel()], dtype=torch.int64, device=self._device)
        self._finish(lambda: _gather_into(sizes, own, self._group), what)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: payload.numel()] = payload.to(self._device)
        everything = torch.empty(longest * self.size, dtype=torch.uint8, device=self._device)
        self._finish(lambda: _gather_into(everything, padded, self._group), what)
        rows = everything.cpu().view(self.size, longest)
        lengths = sizes.tolist()
        return [pickle.loads(bytes(rows[rank, : lengths[rank]].numpy())) for rank in range(self.size)]  # noqa: S301  (from our own ranks)

    def _finish(self, start: Callable[[], dist.Work | None], what: str) -> None:
        self._presence.arrive()
        started = time.monotonic()
        try:
            work = start()
            if work is not None:
                work.wait(self._timeout)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            left = self._timeout.total_seconds() - (time.monotonic() - started)
            absent = self._presence.absent(max(0.0, min(PATIENCE, left)))
            message = f"rank {self.rank} of {self.size}: {what}: {absent} did not answer ({_first_words(error)})"
            raise LoadError(message) from error


def _first_words(error: RuntimeError) -> str:
    """Return what a backend says, without its source file and its advice."""
    said = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
    return said.partition("] ")[2] or said if said.startswith("[/") else said


def _gather_into(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    # torch 2.13 has renamed all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work | None", gather(out, value, group=group, async_op=True))


def as_ranks(group: Ranks | dist.ProcessGroup | DeviceMesh | None, *, timeout: float = DEFAULT_TIMEOUT) -> Ranks:
    """Return the ranks of a process group, of a one-dimensional device mesh, or this process alone (None).

    Raises:
        ValueError: the mesh has more than one dimension.
    """
    if group is None:
        return OneRank()
    if isinstance(group, Ranks):
        return group
    if isinstance(group, dist.ProcessGroup):
        return ProcessRanks(group, timeout=timeout)
    if group.ndim != 1:
        message = f"group: a mesh of {group.ndim} dimensions; take the one that weights are cut over, as mesh['tp']"
        raise ValueError(message)
    return ProcessRanks(group.get_group(), timeout=timeout)


def together(ranks: Ranks, what: str, compute: Callable[[], T]) -> list[T]:
    """Return what `compute` gives on every rank; if it fails on one, all ranks raise.

    Args:
        ranks: the group.
        what: what is computed, for the error.
        compute: gives a picklable value.

    Raises:
        LoadError: it failed on another rank, or a rank does not answer. A failure of this rank is raised as it is.
    """
    try:
        value, failure = compute(), None
    except Exception as error:
        if ranks.size > 1:
            ranks.gather((None, f"{type(error).__name__}: {error}"), what)
        raise
    answers = cast("list[tuple[T, str | None]]", ranks.gather((value, failure), what))
    raise_failures(ranks, what, [answer[1] for answer in answers])
    return [answer[0] for answer in answers]


def raise_failures(ranks: Ranks, what: str, failures: Sequence[str | None]) -> None:
    """Raise if any rank failed.

    Args:
        ranks: the group.
        what: what was done.
        failures: one message a rank, None if it is well.

    Raises:
        LoadError: one line a failed rank.
    """
    lines = [f"rank {rank} of {ranks.size}: {text}" for rank, text in enumerate(failures) if text is not None]
    if lines:
        raise LoadError(f"{what}: " + "\n".join(lines))
