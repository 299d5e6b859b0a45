"""The folder that is written: complete under its own name, or not there at all.

Everything goes into `OUTPUT.partial` first:

    job.json        which job it belongs to
    lock            held by the process that writes it
    files/          what becomes OUTPUT, by one rename
    incomplete/     shards that are being written
    done/N.json     what is known of the N-th shard, once it is complete in files/
    ranks/          only with several processes: one file each

A refusal removes it. An interruption leaves it, however sudden, and the same job started again takes up the shards that
were complete; their bytes are on disk before they count.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.beside import copy_file, files_beside
from quant_kernels.loading.files import Claim, create, make_parents, read_json, write_whole
from quant_kernels.loading.folder import CONFIG_NAME, INDEX_NAME
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quant_kernels.loading.job import Job
    from quant_kernels.loading.shard_layout import ShardLayout

JOB_NAME: Final = "job.json"
LOCK_NAME: Final = "lock"
_LAST: Final = frozenset({JOB_NAME, LOCK_NAME, f"{JOB_NAME}.new"})
_SUMS: Final = 3
Sums = dict[str, list[float]]
"""Layer -> seconds, Σ w², Σ (w − ŵ)² of its weights in one shard."""


class OutputFolder:
    """The partial folder of one job.

    Attributes:
        path: the final folder.
        partial: where files are written until all are complete.
        done: shard -> what was recorded with it, by this run or an earlier one of the same job.
        fingerprint: digest of what decides the bytes of the output.
        is_complete: an earlier run ended between giving the folder its name and writing the report.
    """

    def __init__(self, path: Path, job: Job, *, clean: bool = False, leader: bool = True) -> None:
        """Make the partial folder, or take up that of an interrupted run of the same job.

        Args:
            path: the final folder.
            job: what is to be written.
            clean: remove what an earlier run of whatever job left, and start anew.
            leader: False for all but the first of several processes: the folder is there already.

        Raises:
            LoadError: the output exists, lies within the source, or cannot be made; another job's partial folder is in
                its place; another process is writing it; the disk has not enough space.
        """
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.done: dict[str, Sums] = {}
        self.fingerprint = fingerprint(job)
        self.is_complete = False
        self._job = job
        self._numbers = {layout.file: number for number, layout in enumerate(job.layouts)}
        self._made: list[Path] = []
        self._claim: Claim | None = None
        self._beside = files_beside(job.survey.folder.path)
        if not leader:
            self.take_up()
            return
        self._check_foreign()
        try:
            self._make_folders()
            self._claim = Claim(self.partial / LOCK_NAME)
            self._start(clean=clean)
        except OSError as error:
            self._remove_made()
            message = f"{self.path}: cannot be made: {error.strerror or error}"
            raise LoadError(message) from error
        except BaseException:
            self._remove_made()
            raise

    def _check_foreign(self) -> None:
        """Refuse a partial folder that something else made, before anything in it is touched."""
        try:
            mode = os.lstat(self.partial).st_mode
            names = set(os.listdir(self.partial)) if stat.S_ISDIR(mode) else {"?"}  # noqa: PTH208  (names)
        except FileNotFoundError:
            names = set()
        except OSError as error:
            message = f"{self.partial}: cannot be read: {error.strerror or error}"
            raise LoadError(message) from error
        if names - _LAST and JOB_NAME not in names:
            raise self._foreign()

    def _foreign(self) -> LoadError:
        return LoadError(
            f"{self.partial}: left by another job, or made by something else; remove it (--clean, if a job of ours left"
            " it) or choose another output"
        )

    def _make_folders(self) -> None:
        missing = [each for each in (self.partial, *self.partial.parents) if not each.exists()]
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            self._made.append(folder)

    def _start(self, *, clean: bool) -> None:
        if clean:
            self._empty()
        journal = read_json(self.partial / JOB_NAME)
        ours = isinstance(journal, dict) and journal.get("fingerprint") == self.fingerprint
        if journal is not None and not ours:
            raise self._foreign()
        self.is_complete = (
            ours and not (self.partial / "files").exists() and self.path.is_dir() and self._all_recorded()
        )
        if self.is_complete:
            self.take_up()
            return
        check_output(self.path, self._job.survey.folder.path)
        # First of all: without it, what follows would look like something else's.
        write_whole(self.partial / JOB_NAME, json.dumps({"fingerprint": self.fingerprint}).encode())
        for name in ("files", "incomplete", "done"):
            (self.partial / name).mkdir(exist_ok=True)
        self.take_up()
        # What was being written when an earlier run ended is written again.
        shutil.rmtree(self.partial / "incomplete")
        (self.partial / "incomplete").mkdir()
        todo = sum(layout.nbytes for layout in self._job.layouts if layout.file not in self.done)
        self._check_space(todo + sum(file.nbytes for file in self._beside))

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.partial).free
        if free < needed:
            message = f"{self.partial}: {needed:,} bytes are needed, {free:,} are free"
            raise LoadError(message)

    def _all_recorded(self) -> bool:
        return all(_sums(read_json(self._record(file))) is not None for file in self._numbers)

    def _record(self, file: str) -> Path:
        return self.partial / "done" / f"{self._numbers[file]}.json"

    def take_up(self) -> None:
        """Read which shards are complete."""
        files = self.path if self.is_complete else self.partial / "files"
        for layout in self._job.layouts:
            recorded = _sums(read_json(self._record(layout.file)))
            path = files / layout.file
            if recorded is not None and path.is_file() and path.stat().st_size == layout.nbytes:
                self.done[layout.file] = recorded

    def begin_shard(self, layout: ShardLayout) -> int:
        """Return the descriptor of a shard under its temporary name.

        Raises:
            OSError: it cannot be made.
        """
        return create(self._incomplete(layout))

    def finish_shard(self, layout: ShardLayout, layers: Sums) -> None:
        """Give a complete shard, whose bytes are on disk, its name and write it down.

        Raises:
            OSError: it cannot be.
        """
        files = self.partial / "files"
        make_parents(files, layout.file)
        self._incomplete(layout).replace(files / layout.file)
        write_whole(self._record(layout.file), json.dumps(layers).encode())
        self.done[layout.file] = layers

    def open_shard(self, layout: ShardLayout) -> int:
        """Return a descriptor to read a complete shard by.

        Raises:
            OSError: it cannot be opened.
        """
        return os.open(self.partial / "files" / layout.file, os.O_RDONLY | os.O_CLOEXEC)

    def drop_shard(self, layout: ShardLayout) -> None:
        """Forget a shard whose bytes are wrong: the same job writes it again."""
        self._record(layout.file).unlink(missing_ok=True)
        self.done.pop(layout.file, None)

    def _incomplete(self, layout: ShardLayout) -> Path:
        return self.partial / "incomplete" / f"{self._numbers[layout.file]}.safetensors"

    def write_documents(self) -> None:
        """Write config.json and the index, and copy the tokenizer and all other small files.

        Raises:
            LoadError: one of them was changed.
            OSError: one cannot be written.
        """
        job, files = self._job, self.partial / "files"
        for file in self._beside:
            copy_file(file, files)
        config = written_config(job.survey.folder.config, job.quantization_config)
        write_whole(files / CONFIG_NAME, _json(config))
        weight_map = {part.name: file for file, steps in job.steps.items() for step in steps for part in step.parts}
        index = {"metadata": {"total_size": job.tensor_nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_whole(files / INDEX_NAME, _json(index))

    def complete(self) -> None:
        """Give the folder its own name.

        Raises:
            LoadError: something has taken that name meanwhile.
            OSError: it cannot be renamed.
        """
        check_output(self.path, self._job.survey.folder.path)
        (self.partial / "files").rename(self.path)
        self.is_complete = True

    def close(self) -> None:
        """Remove the partial folder, which holds nothing of worth any more, and give the lock back.

        What is left if this is cut short says so, and the next run removes it.
        """
        with suppress(OSError):
            write_whole(self.partial / JOB_NAME, json.dumps({"finished": True}).encode())
        _remove_finished(self.partial)
        self.release()

    def discard(self) -> None:
        """Remove what was written, and the folders that were made for it."""
        _remove(self.partial)
        self._remove_made()

    def release(self) -> None:
        """Give the lock back and leave what was written."""
        if self._claim is not None:
            self._claim.release()

    def _empty(self) -> None:
        for each in self.partial.iterdir():
            if each.name != LOCK_NAME:
                _remove(each)

    def _remove_made(self) -> None:
        """Remove the folders that this run made, the partial one only if it is ours, and give the lock back."""
        for folder in reversed(self._made):
            if folder == self.partial and self._claim is not None:
                _remove(folder)
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break
        self._made = []
        self.release()


def _remove(path: Path) -> None:
    """Remove a file or folder; again if another process put something there meanwhile, and then leave it."""
    for _ in range(5):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not os.path.lexists(path):
            return


def _sums(record: object) -> Sums | None:
    """Return what a record of a shard holds, or None if it is no such record."""
    if not isinstance(record, dict):
        return None
    fits = all(
        isinstance(each, list) and len(each) == _SUMS and all(type(value) in {int, float} for value in each)
        for each in record.values()
    )
    return record if fits else None


def check_output(path: Path, source: Path) -> None:
    """Refuse an output that exists or lies within the source.

    Raises:
        LoadError: it does.
    """
    if path.exists() or path.is_symlink():
        kind = "folder" if path.is_dir() else "file"
        message = f"{path}: the output {kind} exists; choose another name or remove it"
        raise LoadError(message)
    if not path.name:
        message = f"{path}: the output must be a folder's name"
        raise LoadError(message)
    if path.resolve().is_relative_to(source.resolve()):
        message = f"{path}: the output lies within the source {source}; choose a folder outside"
        raise LoadError(message)
    blocked = next((each for each in path.parents if each.exists() and not each.is_dir()), None)
    if blocked is not None:
        message = f"{path}: {blocked} is a file"
        raise LoadError(message)


def check_output_or_finished(path: Path, source: Path) -> None:
    """Refuse an output that exists or lies within the source, unless its job may have ended before its report.

    What a job left that ended while it tidied up is removed.

    Raises:
        LoadError: as `check_output`.
    """
    partial = path.with_name(f"{path.name}.partial")
    journal = read_json(partial / JOB_NAME)
    finished = isinstance(journal, dict) and journal.get("finished") is True
    if path.is_dir() and partial.is_dir() and not partial.is_symlink():
        if finished or not set(os.listdir(partial)) - _LAST:  # noqa: PTH208  (names)
            with suppress(LoadError, OSError):
                claim = Claim(partial / LOCK_NAME)
                _remove_finished(partial)
                claim.release()
        elif journal is not None:
            return
    check_output(path, source)


def _remove_finished(partial: Path) -> None:
    """Remove a partial folder; what says that it may be removed goes last."""
    for each in partial.iterdir():
        if each.name not in _LAST:
            _remove(each)
    _remove(partial)


def written_config(config: Mapping[str, object], quantization_config: Mapping[str, object]) -> dict[str, object]:
    """Return the config.json of the output: the source's, with `quantization_config` in place of any it had."""
    made = {key: value for key, value in config.items() if key not in {"quantization_config", "compression_config"}}
    nested = made.get("text_config")
    if isinstance(nested, dict):
        made["text_config"] = {key: value for key, value in nested.items() if key != "quantization_config"}
    return {**made, "quantization_config": dict(quantization_config)}


def fingerprint(job: Job) -> str:
    """Return a digest of everything that decides the bytes of a job's output."""
    folder = job.survey.folder
    parts = {
        "shards": [(file, stamp.size, stamp.mtime_ns) for file, stamp in folder.stamps.items()],
        "config": job.survey.config.digest(),
        "quantization_config": job.quantization_config,
        "scale_rounding": job.scale_rounding,
        "layouts": [sha256(layout.header).hexdigest() for layout in job.layouts],
    }
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _json(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
