"""Ranks that are threads of one process: many of them cost nothing, and a rank that fails cannot hang the tests."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

T = TypeVar("T")


class ThreadRanks:
    """One rank of a group of threads; satisfies `quant_kernels.loading.distributed.Ranks`."""

    def __init__(self, rank: int, board: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.sent_bytes = rank, barrier.parties, 0
        self.reductions: list[str] = []
        self._board, self._barrier = board, barrier

    def _exchange(self, value: object, what: str) -> list[object]:
        try:
            self._board[self.rank] = value
            self._barrier.wait()
            values = list(self._board)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise LoadError(f"rank {self.rank}: {what}: another rank does not answer") from error
        return values

    def reduce_max(self, values: Tensor, what: str) -> Tensor:
        self.sent_bytes += values.nbytes
        self.reductions.append(what)
        given = self._exchange(values.clone(), what)
        shapes = {tuple(each.shape) for each in given}
        assert len(shapes) == 1, f"{what}: shapes differ: {shapes}"
        return torch.stack(given).amax(0)

    def gather(self, value: object, what: str) -> list[object]:
        return [pickle.loads(each) for each in self._exchange(pickle.dumps(value), what)]  # noqa: S301


def run_ranks(size: int, work: Callable[[ThreadRanks], T], timeout: float = 60.0) -> list[T | BaseException]:
    """Run `work` on every rank and return what each gave, or the error that it raised."""
    board: list[object] = [None] * size
    barrier = threading.Barrier(size, timeout=timeout)

    def run(rank: int) -> T | BaseException:
        try:
            return work(ThreadRanks(rank, board, barrier))
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def results(answers: list[T | BaseException]) -> list[T]:
    """Return the answers, raising the first error among them."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]
