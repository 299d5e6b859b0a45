"""What the fuzzers share: mutation of JSON trees, the loop that runs a target, and its count of what came out.

A target takes bytes and ends in an answer, or in one of the library's own errors: anything else that it raises is a
finding, and so is taking too long. Where `atheris` can be imported its coverage chooses which inputs are kept and
mutated on; elsewhere the loop here mutates the seeds alone. Findings are written to the folder that `--findings` names;
one that has been understood moves to `tests/torture/corpus/TARGET/`, where `test_fuzzing.py` replays it for ever.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CORPUS: Final = Path(__file__).parent / "corpus"
CASES: Final = Path(__file__).parent.parent / "data" / "cases"
SLOW_S: Final = 1.0
"""Processor seconds that an input of at most 1 MB may take, on a machine that does nothing else."""
WORDS: Final = (
    *("fp8", "mxfp4", "mxfp8", "nvfp4", "ptpc_fp8", "per_block_fp8", "float", "int", "group", "channel", "block"),
    *(
        "*",
        "*.gate.*",
        "*expert*",
        "a.b",
        "lm_head",
        "Linear",
        "re:.*a",
        "re:(a|aa)+$",
        "re:(?!a).*b",
        "[a-z]*",
        "?",
        "[",
    ),
    *("re:(?i)" + "a?" * 30 + "a" * 30, "re:" + "(?:a|b" * 60 + ")" * 60, "re:.*a.{900}b", "re:(a)\\1", "re:\\b(a*)*c"),
    *("", " ", ".", "..", "\u00e9", "\ud800", "\x00", "a\nb", "9" * 30, "model.layers.0.mlp.experts", "experts"),
)
NUMBERS: Final = (0, 1, -1, 2, 3, 4, 8, 16, 32, 128, 2**31, 2**63, 10**30, 0.5, 1e308, -1e-300)


@attrs.frozen
class Target:
    """One thing that is fuzzed.

    Attributes:
        name: folder of its corpus.
        run: takes an input; raises for a finding; returns a word for the count of outcomes.
        seeds: returns inputs to begin with.
    """

    name: str
    run: Callable[[bytes], str]
    seeds: Callable[[], list[bytes]]


class FindingError(AssertionError):
    """An input led to something that is neither an answer nor one of the library's errors."""


def corpus(name: str) -> list[bytes]:
    """Return the inputs that once were findings."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*")) if path.is_file()]


def timed(target: Target, data: bytes, seconds: float = 3 * SLOW_S) -> str:
    """Run a target on one input.

    Raises:
        FindingError: it takes more than `seconds` of processor time, three times as much as is promised: fuzzers share
            their machine, and coverage is counted while they run.
    """
    started = time.process_time()
    outcome = target.run(data)
    taken = time.process_time() - started
    if taken > seconds and len(data) <= 2**20:
        message = f"{target.name}: {len(data)} bytes took {taken:.1f} s"
        raise FindingError(message)
    return outcome


# -------------------------------------------------------------------------------------------------------- mutation


def places(value: object) -> Iterator[tuple[dict[str, object] | list[object], object]]:
    """Yield each container in a JSON tree with each of its keys or indices."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            yield from ((each, key) for key in list(each))
            stack.extend(each.values())
        elif isinstance(each, list):
            yield from ((each, index) for index in range(len(each)))
            stack.extend(each)


def invented(chance: random.Random, depth: int = 2) -> object:
    """Return a JSON value out of nothing."""
    kind = chance.randrange(8 if depth else 5)
    if kind < 2:
        return chance.choice(WORDS)
    if kind == 2:
        return chance.choice(NUMBERS)
    if kind < 5:
        return chance.choice((None, True, False))
    members = [invented(chance, depth - 1) for _ in range(chance.randrange(3))]
    return members if kind == 5 else {chance.choice(WORDS): each for each in members}


def changed(value: object, chance: random.Random) -> object:
    """Return a value of the same type, changed a little, or one out of nothing."""
    if isinstance(value, str) and chance.random() < 0.7:
        at = chance.randrange(len(value) + 1)
        return chance.choice(
            (
                value[:at] + chance.choice(WORDS) + value[at:],
                value[:at] + value[at + 1 :],
                value * chance.choice((2, 3, 50)),
                f"re:{value}",
                value.swapcase(),
            )
        )[:20_000]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((-1, 1))
    if isinstance(value, list) and value and chance.random() < 0.5:
        return (value * chance.choice((2, 3, 40)))[:2_000]
    return invented(chance)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return an input near `data`: its JSON tree changed in some places, or its bytes where it is no JSON."""
    try:
        tree = json.loads(data)
        if chance.random() > 0.05:
            return json.dumps(mutated_tree(tree, chance)).encode()
    except (ValueError, RecursionError):  # no JSON, or numbers and depths that Python does not write
        pass
    return mutated_bytes(data, chance)


def mutated_tree(tree: object, chance: random.Random) -> object:
    """Return a JSON tree changed in some places; `tree` itself is changed too."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        found = list(places(tree))
        if not found:
            tree = invented(chance, 3)
            continue
        container, key = chance.choice(found)
        act = chance.randrange(6)
        if act == 0:
            del container[key]  # type: ignore[arg-type]
        elif act == 1 and isinstance(container, dict):
            container[str(changed(key, chance))] = container[key]  # type: ignore[index]
        elif act == 2:
            other, place = chance.choice(found)
            with contextlib.suppress(LookupError):
                container[key] = json.loads(json.dumps(other[place]))  # type: ignore[index]
        else:
            container[key] = changed(container[key], chance)  # type: ignore[index]
    return tree


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with some bytes changed, taken out or put in."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 2, 8))):
        at = chance.randrange(len(found) + 1)
        act = chance.randrange(4)
        if act == 0:
            found[at : at + 1] = bytes([chance.randrange(256)])
        elif act == 1:
            del found[at : at + chance.choice((1, 4, 64))]
        elif act == 2:
            found[at:at] = chance.choice((b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\u", b"1e999", b"NaN", b"-"))
        else:
            found[at:at] = found[: chance.choice((1, 16, 256))]
    return bytes(found)


# ----------------------------------------------------------------------------------------------------------- loops


def without_coverage(target: Target, runs: int, seconds: float, seed: int, findings: Path | None = None) -> int:
    """Mutate the seeds for `runs` inputs or `seconds`, whichever ends first; return the number of inputs that ran."""
    chance = random.Random(seed)  # noqa: S311  (a reproducible choice)
    pool = [*target.seeds(), *corpus(target.name)]
    outcomes: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds
    count = 0
    while count < runs and time.monotonic() < end:
        data = mutated(chance.choice(pool), chance)
        count += 1
        try:
            outcomes[timed(target, data)] += 1
        except BaseException:
            keep(data, target, findings)
            raise
        if len(pool) < 5_000 and len(data) < 20_000 and chance.random() < 0.02:
            pool.append(data)
    print(f"{target.name}: {count} inputs from seed {seed}: {dict(outcomes.most_common())}")
    return count


def keep(data: bytes, target: Target, findings: Path | None) -> None:
    """Write a finding's input to its folder, if there is one."""
    if findings is not None:
        findings.mkdir(parents=True, exist_ok=True)
        path = findings / f"{target.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        print(f"finding: {path}", file=sys.stderr)


def with_coverage(target: Target, options: Sequence[str]) -> None:
    """Hand the target to atheris, which ends the process."""
    import atheris

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        chance = random.Random(seed)  # noqa: S311  (a reproducible choice)
        found = mutated(data, chance) if chance.random() < 0.9 else atheris.Mutate(data, longest)
        return found[:longest]

    atheris.Setup([sys.argv[0], *options], lambda data: timed(target, data) and None, custom_mutator=mutate)
    atheris.Fuzz()


def guided(script: str, target: Target, given: argparse.Namespace) -> int:
    """Run this script again under atheris, and return the number of inputs that ran; exits where there is a finding."""
    work = given.findings / "pool" / target.name
    work.mkdir(parents=True, exist_ok=True)
    for data in (*target.seeds(), *corpus(target.name)):
        (work / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    options = [f"-runs={given.runs}", f"-max_total_time={int(given.seconds)}", f"-seed={given.seed}", "-max_len=65536"]
    options += ["-timeout=20", f"-artifact_prefix={given.findings}/{target.name}-", "-rss_limit_mb=2048"]
    command = [sys.executable, script, "--only", target.name, "--coverage", "--", *options, str(work)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        tail = collections.deque(child.stderr, maxlen=60)
    done = re.search(r"Done (\d+) runs in (\d+) second", "".join(tail))
    if child.returncode or done is None:
        print("".join(tail), file=sys.stderr)
        sys.exit(1)
    print(f"{target.name}: {done[1]} inputs in {done[2]} s, guided by coverage, from seed {given.seed}")
    return int(done[1])


def main(script: str, load: Callable[[], list[Target]], package: str) -> int:
    """Run the targets of one script; `load` imports what they test, so that coverage can be put into it first."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each target")
    parser.add_argument("--seconds", type=float, default=60, help="longest time for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**31)
    parser.add_argument("--only", help="one target")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzzing"), help="where findings are written")
    parser.add_argument("--unguided", action="store_true", help="without atheris, even where it can be imported")
    parser.add_argument("--coverage", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        import atheris
    except ImportError:
        atheris = None
    if given.coverage:
        with atheris.instrument_imports(include=[package]):
            targets = load()
        with_coverage(next(each for each in targets if each.name == given.only), given.rest)
    total = 0
    for target in load():
        if given.only not in {None, target.name}:
            continue
        if atheris is None or given.unguided:
            print(f"{target.name}: atheris is not used: mutation without coverage")
            total += without_coverage(target, given.runs, given.seconds, given.seed, given.findings)
        else:
            total += guided(script, target, given)
    print(f"{total} inputs, no finding")
    return 0
