"""The short form of checkpoint_faults.py, and faults that need a process of their own."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoint_faults as faults
import pytest
from checkpoint_faults import CHANGES, Kill

from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.sinks import DifferenceError
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event

Scene = tuple[Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    mp.get_context("forkserver").set_forkserver_preload(faults.PRELOAD)
    with faults.scene() as found:
        yield found


@pytest.fixture
def output(scene: Scene) -> Iterator[Path]:
    found = scene[0].parent / "out"
    yield found
    for path in (found, found.with_name("out.partial")):
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("number", range(6))
def test_killed_and_taken_up(scene: Scene, output: Path, number: int) -> None:
    model, expected = scene
    calls = faults.count_calls(model, names=(*CHANGES, *faults.REMOVALS))
    # The last calls come between the rename of the folder and the end of the process.
    at = [calls // 5, calls // 3, calls // 2, 3 * calls // 4, calls - 8, calls - 2][number]
    kills = [Kill(at, after=number % 2 == 0, seconds=0)] * (1 + number % 2)
    hit, complaint = faults.kill_and_resume(model, output, kills, expected)
    assert not complaint
    assert hit


def test_killed_at_every_call_before_the_first_shard(scene: Scene, output: Path) -> None:
    model, expected = scene
    for at in range(14):
        hit, complaint = faults.kill_and_resume(model, output, [Kill(at, after=False, seconds=0)], expected)
        assert not complaint
        assert hit
        shutil.rmtree(output)


def test_killed_at_random_times(scene: Scene, output: Path) -> None:
    model, expected = scene
    chance = random.Random(7)  # noqa: S311  (repeatable, no secret)
    kills = [Kill(-1, after=False, seconds=chance.random() * 0.2) for _ in range(3)]
    assert not faults.kill_and_resume(model, output, kills, expected)[1]


def test_every_call_fails_for_good(scene: Scene, output: Path) -> None:
    (model, expected), code = scene, errno.ENOSPC
    calls = faults.count_calls(model, names=CHANGES)
    # Every call near the ends, where they differ, and each fifth of those between.
    for at in (*range(15), *range(15, calls - 15, 9), *range(calls - 15, calls)):
        complaint = faults.fail_and_resume(model, output, at, code, for_good=True, expected=expected)
        assert not complaint
        shutil.rmtree(output)


def limited(model: Path, output: Path, nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    try:
        faults.quantize(model, output)
    except LoadError as error:
        raise SystemExit(10 if os.strerror(errno.EFBIG) in str(error) else 11) from None


@pytest.mark.parametrize("nbytes", [0, 100, 5000, 20_000])
def test_files_may_not_grow(scene: Scene, output: Path, nbytes: int) -> None:
    model, expected = scene
    child = mp.get_context("forkserver").Process(target=limited, args=(model, output, nbytes))
    child.start()
    child.join()
    assert child.exitcode == 10
    assert not output.exists()
    faults.quantize(model, output)
    assert faults.contents(output) == expected


@pytest.mark.parametrize("place", ["/proc/out", "/sys/out", "/proc/self/fd/out"])
def test_where_nothing_can_be_made(scene: Scene, place: str) -> None:
    with pytest.raises(LoadError, match=rf"^{place}: cannot be made: "):
        faults.quantize(scene[0], Path(place))


class Hold:
    """Progress that lets a job stand still after its first tensor until it is told to go on."""

    def __init__(self, reached: Event, go: Event) -> None:
        self.reached, self.go = reached, go

    def start(self, total: int) -> None:
        assert total

    def advance(self, nbytes: int, name: str) -> None:
        assert nbytes
        assert name
        self.reached.set()
        assert self.go.wait(30)


def held(model: Path, output: Path, reached: Event, go: Event) -> None:
    quantize_checkpoint(model, faults.REQUEST, output, write_report=False, progress=Hold(reached, go))


@pytest.mark.parametrize("clean", [False, True])
def test_one_of_two_processes_wins(scene: Scene, output: Path, clean: bool) -> None:  # noqa: FBT001
    model, expected = scene
    context = mp.get_context("forkserver")
    reached, go = context.Event(), context.Event()
    first = context.Process(target=held, args=(model, output, reached, go))
    first.start()
    assert reached.wait(30)
    with pytest.raises(LoadError, match=rf"out\.partial: another process is writing it \(process {first.pid} on "):
        quantize_checkpoint(model, faults.REQUEST, output, write_report=False, clean=clean)
    go.set()
    first.join()
    assert first.exitcode == 0
    assert faults.contents(output) == expected
    with pytest.raises(LoadError, match="the output folder exists"):
        faults.quantize(model, output)


class Act:
    """Progress that does something at the first tensor of the third shard."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act: Callable[[], object] | None = act

    def start(self, total: int) -> None:
        assert total

    def advance(self, nbytes: int, name: str) -> None:
        assert nbytes >= 0
        if name.startswith("layers.2") and self.act is not None:
            act, self.act = self.act, None
            act()


def rewritten(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


CHANGED: dict[str, Callable[[Path], object]] = {
    "written to": lambda path: os.utime(path, ns=(1, 1)) or path.write_bytes(path.read_bytes()),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 2),
    "removed": lambda path: path.unlink(),
    "another file": rewritten,
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.parametrize("file", ["part-2.safetensors", "part-3.safetensors"])
def test_a_source_that_changes_is_refused_by_name(scene: Scene, tmp_path: Path, file: str, how: str) -> None:
    model = shutil.copytree(scene[0], tmp_path / "model")
    act = Act(lambda: CHANGED[how](model / file))
    with pytest.raises(LoadError) as caught:
        quantize_checkpoint(model, faults.REQUEST, tmp_path / "out", write_report=False, progress=act)
    assert str(caught.value).startswith(f"{file}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "extra/merges.txt"])
def test_a_file_beside_the_weights_that_changes_is_refused(scene: Scene, tmp_path: Path, name: str) -> None:
    model = shutil.copytree(scene[0], tmp_path / "model")
    act = Act(lambda: (model / name).write_text("other"))
    with pytest.raises(LoadError, match=f"{name}: it was changed"):
        quantize_checkpoint(model, faults.REQUEST, tmp_path / "out", write_report=False, progress=act)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [0, 1, 7, 20, 30])
def test_read_errors_in_the_middle(scene: Scene, output: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    model, expected = scene
    real, count = os.preadv, iter(range(1 << 30))

    def failing(*given: Any) -> int:  # noqa: ANN401  (as the call has)
        if next(count) >= at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(LoadError, match=r"^part-\d\.safetensors: cannot be read: Input/output error"):
        faults.quantize(model, output)
    assert not output.exists()
    monkeypatch.undo()
    faults.quantize(model, output)
    assert faults.contents(output) == expected


def vanish(partial: Path) -> None:
    shutil.rmtree(partial)


def replaced(partial: Path) -> None:
    shutil.rmtree(partial)
    partial.write_text("mine")


@pytest.mark.parametrize("act", [vanish, replaced])
def test_a_partial_folder_that_goes_while_it_is_written(
    scene: Scene, output: Path, act: Callable[[Path], None]
) -> None:
    partial = output.with_name("out.partial")
    with pytest.raises(LoadError, match=r"out: cannot be written: "):
        quantize_checkpoint(scene[0], faults.REQUEST, output, write_report=False, progress=Act(lambda: act(partial)))
    assert not output.exists()
    partial.unlink(missing_ok=True)


def test_verify_finds_every_changed_byte(scene: Scene, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_kernels.loading.shards import ShardWriter

    model, expected = scene
    chance = random.Random(3)  # noqa: S311  (repeatable, no secret)
    real = ShardWriter.verify
    changed: list[str] = []

    def spoilt(self: ShardWriter) -> object:
        path = chance.choice(sorted((output.with_name("out.partial") / "files").glob("*.safetensors")))
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        changed.append(path.name)
        return real(self)

    for _ in range(12):
        monkeypatch.setattr(ShardWriter, "verify", spoilt)
        with pytest.raises(DifferenceError) as caught:
            quantize_checkpoint(model, faults.REQUEST, output, write_report=False, verify=True)
        assert str(caught.value).startswith(changed[-1])
        assert not output.exists()
    monkeypatch.undo()
    quantize_checkpoint(model, faults.REQUEST, output, write_report=False, verify=True)
    assert faults.contents(output) == expected


def test_clean_starts_anew_and_touches_nothing_foreign(scene: Scene, output: Path) -> None:
    model, expected = scene
    partial = output.with_name("out.partial")

    class Interrupt(Act):
        def __init__(self) -> None:
            super().__init__(lambda: signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(model, faults.REQUEST, output, write_report=False, progress=Interrupt())
    assert (partial / "files" / "part-0.safetensors").exists()
    other = {"global_quant_config": "mxfp8"}
    with pytest.raises(LoadError, match="left by another job"):
        quantize_checkpoint(model, other, output, write_report=False)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(model, other, output, write_report=False, clean=True, progress=Interrupt())
    quantize_checkpoint(model, faults.REQUEST, output, write_report=False, clean=True)
    assert faults.contents(output) == expected
    assert not partial.exists()
    partial.mkdir()
    (partial / "mine").write_text("mine")
    shutil.rmtree(output)
    with pytest.raises(LoadError, match="made by something else"):
        quantize_checkpoint(model, faults.REQUEST, output, write_report=False, clean=True)
    assert (partial / "mine").read_text() == "mine"
