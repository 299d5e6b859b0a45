"""Timing on a GPU: the median of events around replayed graphs over buffers that do not fit the cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE_BYTES = 600_000_000
"""Bytes that one graph walks over at least: ten times the cache of an H200."""


SETTLING_SECONDS = 0.05
"""How long a function runs before it is timed: clocks fall while the device waits, and take milliseconds to rise."""


def settle(function: Callable[[], object]) -> None:
    """Run a function until the device's clocks are those of steady work."""
    end = time.perf_counter() + SETTLING_SECONDS
    while time.perf_counter() < end:
        function()
        torch.cuda.synchronize()


def copies_for(nbytes: int) -> int:
    """Distinct buffer sets of `nbytes` each that one graph needs."""
    return max(2, min(48, -(-CACHE_BYTES // max(nbytes, 1))))


def graph_microseconds(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one call in µs: all calls in one captured graph, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        found = events(graph.replay, repeats)
    return found / len(calls)


def events(function: Callable[[], object], repeats: int = 15) -> float:
    """Median time of a call in µs, by events."""
    settle(function)
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times: list[float] = sorted(1000 * start.elapsed_time(end) for start, end in pairs)
    return times[len(times) // 2]


def copy_ceiling() -> float:
    """Bytes read and written in a second by a device copy of 4.3 GB, outside any graph, in GB/s."""
    source = torch.empty(2_147_483_648, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * source.numel() / events(lambda: target.copy_(source)) / 1e3
