"""The short form of threads.py."""

from __future__ import annotations

import os

import pytest
import threads


def test_many_threads_resolve_while_configs_come_and_go() -> None:
    assert threads.resolving(threads=32, seconds=1.5, seed=1) > 1000


def test_eight_loaders_fill_one_quantizer() -> None:
    jobs, failed = threads.loading(loaders=8, seconds=2.0, seed=1)
    assert jobs >= 3
    assert 0 < failed < jobs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_children_answer_like_their_parent() -> None:
    assert threads.forking(rounds=3, seed=1) == 3
