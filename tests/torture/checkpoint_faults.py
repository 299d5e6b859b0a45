"""The checkpoint job killed, or refused by the system, at any call that changes the disk; then taken up again.

    python tests/torture/checkpoint_faults.py [--kills N] [--errors] [--seed N] [--at-once N]

A small checkpoint is quantized in a process of its own. It is killed (SIGKILL) before or after the k-th call that
changes the disk, or after a random time, up to three times in a row; then the same job runs to its end. The output must
be, byte for byte, that of an undisturbed run, nothing may have stood under its name before, and no other file may be
left. With `--errors`, every such call fails once with each of several errors of the system, and from then on for good.
The last lines give the counts.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from safetensors.torch import save_file

from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REQUEST = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.up.*": "mxfp4", "*.down": "nvfp4"}}
SHARDS, BLOCKS = 4, 3
CHANGES = ("open", "write", "pwrite", "ftruncate", "fsync", "replace", "rename", "mkdir")
REMOVALS = ("unlink", "rmdir")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
LOST = 255
"""Exit code of a process whose own one the fork server did not hear."""
PRELOAD = ["quant_kernels.loading.checkpoint", "safetensors.torch"]


class Calls:
    """Counts the calls that change the disk; does something at one of them."""

    def __init__(self, at: int, act: Callable[[str], None], *, names: Sequence[str], after: bool = False) -> None:
        """Take the number of the call, from 0, and what happens then, before the call or after it."""
        self.count = 0
        self._at, self._act, self._names, self._after = at, act, names, after
        self._lock = threading.Lock()
        self._real: dict[str, Any] = {}

    def __enter__(self) -> Calls:  # noqa: PYI034  (typing.Self needs Python 3.11)
        for name in self._names:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name, self._real[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*given: Any, **named: Any) -> object:  # noqa: ANN401  (as the call has)
            if name == "open" and not (len(given) > 1 and given[1] & os.O_CREAT):
                return real(*given, **named)
            with self._lock:
                mine = self.count
                self.count += 1
            if mine >= self._at and not self._after:
                self._act(name)
            found = real(*given, **named)
            if mine >= self._at and self._after:
                self._act(name)
            return found

        return call


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of a few shards, with files beside them."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    weight_map = {}
    for shard in range(SHARDS):
        file = f"part-{shard}.safetensors"
        tensors = {
            f"layers.{shard}.{block}.{leaf}.weight": torch.randn(shape, generator=generator).bfloat16()
            for block in range(BLOCKS)
            for leaf, shape in {"up.a": (64, 64), "down": (32, 64), "side": (48, 96), "norm": (64,)}.items()
        }
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}" * 1000)
    (folder / "extra").mkdir()
    (folder / "extra" / "merges.txt").write_text("a b\n")
    return folder


def quantize(model: Path, output: Path) -> None:
    """Run the job to its end in this process."""
    quantize_checkpoint(model, REQUEST, output, write_report=False)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def scene() -> Iterator[tuple[Path, dict[str, bytes]]]:
    """A model in a folder of its own, and what an undisturbed run makes of it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        model = make_model(Path(name, "model"))
        quantize(model, Path(name, "undisturbed"))
        yield model, contents(Path(name, "undisturbed"))


def count_calls(model: Path, *, names: Sequence[str]) -> int:
    """How many calls of a run change the disk."""
    output = model.parent / "counted"
    with Calls(1 << 62, lambda _: None, names=names) as calls:
        quantize(model, output)
    shutil.rmtree(output)
    return calls.count


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_child(model: Path, output: Path, at: int, after: bool) -> None:  # noqa: FBT001  (crosses to a process)
    """Run the job and kill this process at the `at`-th call; −1: whoever started it does."""
    try:
        if at < 0:
            quantize(model, output)
        else:
            with Calls(at, _die, names=(*CHANGES, *REMOVALS), after=after):
                quantize(model, output)
    except LoadError as error:
        # Whoever started it judges the exit code, by what is there.
        raise SystemExit(1 if "exists" in str(error) else 2) from error


@attrs.frozen
class Kill:
    """When a process is killed: at a call, before or after it, or after some seconds."""

    at: int
    after: bool
    seconds: float


def kill_and_resume(model: Path, output: Path, kills: Sequence[Kill], expected: dict[str, bytes]) -> tuple[int, str]:
    """Kill a job as told, run it to its end; return how many kills hit, and a complaint or an empty text."""
    context = mp.get_context("forkserver")
    partial = output.with_name(f"{output.name}.partial")
    hit = 0
    told = f"{output.name}, {kills}"
    for kill in kills:
        child = context.Process(target=killed_child, args=(model, output, kill.at, kill.after))
        child.start()
        if kill.at < 0:
            child.join(kill.seconds)
            child.kill()
        child.join()
        hit += child.exitcode == -signal.SIGKILL
        if child.exitcode not in {0, 1, LOST, -signal.SIGKILL} or (
            child.exitcode == 1 and (partial.exists() or not output.exists())
        ):
            return hit, f"{told}: exit code {child.exitcode}"
        if output.exists() and contents(output) != expected:
            return hit, f"{told}: something unfinished stands under the final name"
        if output.exists() and not partial.exists():
            break
    try:
        if not output.exists() or partial.exists():
            quantize(model, output)
    except LoadError as error:
        # Killed while it tidied up: the next run removes what is left, and there is nothing more to do.
        if partial.exists() or "exists" not in str(error):
            return hit, f"{told}: not taken up: {error}"
    if contents(output) != expected:
        return hit, f"{told}: other bytes than those of an undisturbed run"
    return hit, f"{told}: {partial.name} is left" if partial.exists() else ""


def fail_and_resume(
    model: Path, output: Path, at: int, code: int, *, for_good: bool, expected: dict[str, bytes]
) -> str:
    """Let the `at`-th call fail, once or from then on; run the job again; return a complaint or an empty text."""
    failed = threading.Event()

    def fail(name: str) -> None:
        if for_good or not failed.is_set():
            failed.set()
            raise OSError(code, os.strerror(code), name)

    told = f"call {at} fails {'for good ' if for_good else ''}with {errno.errorcode[code]}"
    try:
        with Calls(at, fail, names=CHANGES):
            quantize(model, output)
        if not failed.is_set():
            return f"{told}: there is no such call"
        return "" if contents(output) == expected else f"{told}: passed over, and the output is another"
    except LoadError as error:
        if os.strerror(code) not in str(error):
            return f"{told}: the message does not say so: {error}"
    if output.exists():
        return f"{told}: something stands under the final name"
    quantize(model, output)
    if contents(output) != expected:
        return f"{told}: other bytes than those of an undisturbed run"
    left = sorted(path.name for path in output.parent.glob(f"{output.name}*"))
    return "" if left == [output.name] else f"{told}: left: {left}"


def draw(chance: random.Random, calls: int, seconds: float) -> list[Kill]:
    """One to three kills, at calls or at times."""
    return [
        Kill(chance.randrange(calls) if chance.random() < 0.6 else -1, chance.random() < 0.5, chance.random() * seconds)
        for _ in range(chance.choice((1, 1, 1, 2, 3)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    chance = random.Random(options.seed)  # noqa: S311  (repeatable, no secret)
    failures: list[str] = []
    counts: Counter[str] = Counter()
    with scene() as (model, expected):
        calls = count_calls(model, names=(*CHANGES, *REMOVALS))
        started = time.perf_counter()
        kill_and_resume(model, model.parent / "timed", [Kill(1 << 62, after=False, seconds=0)], expected)
        seconds = time.perf_counter() - started
        with ThreadPoolExecutor(options.at_once) as pool:
            number = 0
            while counts["kills"] < options.kills:
                batch = [draw(chance, calls, seconds) for _ in range(16)]
                names = [model.parent / f"out{number + index}" for index in range(len(batch))]
                number += len(batch)
                for hit, line in pool.map(kill_and_resume, [model] * 16, names, batch, [expected] * 16):
                    counts["kills"] += hit
                    counts["jobs"] += 1
                    failures += [line] * bool(line)
                for name in names:
                    shutil.rmtree(name, ignore_errors=True)
        if options.errors:
            for at in range(count_calls(model, names=CHANGES)):
                for code in ERRORS:
                    for for_good in (False, True):
                        output = model.parent / "failed"
                        line = fail_and_resume(model, output, at, code, for_good=for_good, expected=expected)
                        counts["errors"] += 1
                        failures += [line] * bool(line)
                        shutil.rmtree(output, ignore_errors=True)
                        shutil.rmtree(f"{output}.partial", ignore_errors=True)
    print(*failures, sep="\n")
    print(f"checkpoint faults: seed {options.seed}, {counts['jobs']} jobs, {counts['kills']} times killed by SIGKILL")
    print(f"checkpoint faults: {counts['errors']} errors of the system, over {calls} calls that change the disk")
    print(f"checkpoint faults: {len(failures)} complaints")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
