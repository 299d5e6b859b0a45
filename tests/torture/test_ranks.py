"""The short form of ranks.py: each way and fault at the first exchange, in the middle, and at the last."""

from __future__ import annotations

import random

import pytest
import ranks
from ranks import EXCHANGES, FAULTS, WAYS, Fault, Job, Way


def short_jobs(way: Way, fault: Fault | None) -> list[Job]:
    last = EXCHANGES - 1 if way == "in memory" else EXCHANGES - 2
    places = {"stalled": (4,), "another config": (0,), "out of memory": (0, 3), None: (0,)}.get(fault, (0, 4, last))
    chance = random.Random(str(fault))  # noqa: S311  (repeatable, no secret)
    return [Job(way, fault, at, chance.randrange(3)) for at in places]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_rank_is_told_which_one_failed(way: Way, fault: Fault | None) -> None:
    assert not ranks.run_all(short_jobs(way, fault), at_once=3)
