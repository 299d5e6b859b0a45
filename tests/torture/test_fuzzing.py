"""The fuzzers' short form: every input that once was a finding, and a few hundred new ones from a fixed seed."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

import fuzz_cli
import fuzz_config
import fuzz_headers
from fuzzing import CORPUS, FindingError, Target, corpus, mutated, places, timed, without_coverage

TARGETS = {each.name: each for load in (fuzz_config.load, fuzz_headers.load, fuzz_cli.load) for each in load()}
INPUTS = {"config": 120, "headers": 1_000, "index": 200, "cli": 10}


def test_each_target_has_a_corpus_and_no_corpus_lacks_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_past_findings_stay_fixed(name: str) -> None:
    assert corpus(name), "a folder without an input is not kept by git"
    for data in corpus(name):
        timed(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_inputs_near_them(name: str) -> None:
    outcomes = {TARGETS[name].run(data) for data in TARGETS[name].seeds()}
    assert outcomes - {"refused", "refused, or asks for nothing", "no input", "no JSON"}
    assert without_coverage(TARGETS[name], INPUTS[name], 60, seed=2_026) == INPUTS[name]


def test_a_finding_is_kept(tmp_path: Path) -> None:
    def run(data: bytes) -> str:
        if b"mxfp4" in data:
            raise KeyError
        return "fine"

    target = Target("config", run, lambda: [b'{"a": "mxfp8"}'])
    with pytest.raises(KeyError):
        without_coverage(target, 10_000, 60, seed=1, findings=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert b"mxfp4" in kept.read_bytes()


def test_what_takes_too_long_is_a_finding() -> None:
    target = Target("config", lambda _: str(sum(range(300_000))), lambda: [b"{}"])
    with pytest.raises(FindingError, match="2 bytes took"):
        timed(target, b"{}", seconds=0.0001)


def test_mutation_reaches_every_place_and_repeats_itself_from_a_seed() -> None:
    document = {"a": [1, {"b": "c"}], "d": None}
    assert {str(key) for _, key in places(document)} == {"a", "d", "0", "1", "b"}
    data = json.dumps(document).encode()

    def some() -> list[bytes]:
        return [mutated(data, random.Random(seed)) for seed in range(200)]  # noqa: S311  (a reproducible choice)

    assert some() == some()
    assert len(set(some())) > 150
