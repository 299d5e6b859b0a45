"""The folder that is written: complete under its own name, or not there at all.

Everything goes into `OUTPUT.partial` first. A refusal removes it; an interruption leaves it, and the same job started
again takes up the files that were complete. Only at the end is it renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from quant_kernels.loading.beside import copy_file, files_beside
from quant_kernels.loading.folder import CONFIG_NAME, INDEX_NAME
from quant_spec import LoadError, QuantSpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quant_kernels.loading.job import Job

JOURNAL_NAME: Final = ".quant-spec-job.json"
"""File in the partial folder that says which job it belongs to and which shards are complete."""


class OutputFolder:
    """The partial folder of one job.

    Attributes:
        path: the final folder.
        partial: where files are written until all are complete.
        done: shard -> what the journal recorded with it, from an earlier run of the same job.
    """

    def __init__(self, path: Path, job: Job) -> None:
        """Make the partial folder, or take up that of an interrupted run of the same job.

        Raises:
            LoadError: the output exists, lies within the source, cannot be made, or another job's partial folder is
                in its place.
        """
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.done: dict[str, dict[str, list[float]]] = {}
        self._job = job
        self._fingerprint = fingerprint(job)
        self._made: list[Path] = []
        check_output(path, job.survey.folder.path)
        self._beside = files_beside(job.survey.folder.path)
        if self.partial.exists():
            self._take_up()
        else:
            self._make()

    def _make(self) -> None:
        missing = [each for each in (self.partial, *self.partial.parents) if not each.exists()]
        try:
            for folder in reversed(missing):
                folder.mkdir()
                self._made.append(folder)
            self._job.check_space(self.partial)
            self._write_journal()
        except OSError as error:
            self.discard()
            message = f"{self.path}: cannot be made: {error.strerror or error}"
            raise LoadError(message) from error
        except QuantSpecError:
            self.discard()
            raise

    def _take_up(self) -> None:
        try:
            journal = json.loads((self.partial / JOURNAL_NAME).read_bytes())
            same = journal["fingerprint"] == self._fingerprint
            recorded: dict[str, dict[str, list[float]]] = journal["done"]
        except (OSError, ValueError, KeyError, TypeError):
            same, recorded = False, {}
        if not same:
            message = (
                f"{self.partial}: left by another job, or made by something else; remove it or choose another output"
            )
            raise LoadError(message)
        sizes = {layout.file: layout.nbytes for layout in self._job.layouts}
        for file, layers in recorded.items():
            path = self.partial / file
            if path.is_file() and path.stat().st_size == sizes.get(file):
                self.done[file] = layers

    def begin_shard(self, file: str) -> tuple[Path, int]:
        """Return the path and descriptor of a shard under its temporary name.

        Raises:
            OSError: it cannot be made.
        """
        path = self.partial / f"{file}.incomplete"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def finish_shard(self, file: str, path: Path, layers: dict[str, list[float]]) -> None:
        """Give a complete shard its name and write it down.

        Args:
            file: the shard.
            path: its temporary path.
            layers: layer -> seconds, Σ w², Σ (w − ŵ)² of its weights in this shard.
        """
        path.rename(self.partial / file)
        self.done[file] = layers
        self._write_journal()

    def _write_journal(self) -> None:
        journal = {"fingerprint": self._fingerprint, "done": self.done}
        scratch = self.partial / f"{JOURNAL_NAME}.new"
        scratch.write_text(json.dumps(journal), "utf-8")
        scratch.rename(self.partial / JOURNAL_NAME)

    def write_documents(self) -> None:
        """Write config.json and the index, and copy the tokenizer and all other small files."""
        folder, job = self._job.survey.folder, self._job
        for file in self._beside:
            copy_file(file, self.partial / file.name)
        (self.partial / CONFIG_NAME).write_text(_json(written_config(folder.config, job.quantization_config)), "utf-8")
        weight_map = {part.name: file for file, steps in job.steps.items() for step in steps for part in step.parts}
        index = {"metadata": {"total_size": job.tensor_nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.partial / INDEX_NAME).write_text(_json(index), "utf-8")

    def complete(self) -> None:
        """Give the folder its own name.

        Raises:
            LoadError: something has taken that name meanwhile.
        """
        (self.partial / JOURNAL_NAME).unlink(missing_ok=True)
        check_output(self.path, self._job.survey.folder.path)
        self.partial.rename(self.path)

    def discard(self) -> None:
        """Remove what was written, and the folders that were made for it."""
        shutil.rmtree(self.partial, ignore_errors=True)
        for folder in reversed(self._made):
            if folder != self.partial and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


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
    shards = [(file, (folder.path / file).stat()) for file in folder.shards]
    parts = {
        "shards": [(file, stat.st_size, stat.st_mtime_ns) for file, stat in shards],
        "config": job.survey.config.digest(),
        "quantization_config": job.quantization_config,
        "scale_rounding": job.scale_rounding,
        "layouts": [sha256(layout.header).hexdigest() for layout in job.layouts],
    }
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _json(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
