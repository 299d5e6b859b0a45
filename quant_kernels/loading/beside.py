"""The files beside the weights, tokenizer and all, which a quantized checkpoint takes over as they are.

Links are followed only to plain files within the checkpoint folder, and to folders not at all: a link to its own parent
would be copied for ever, one to `/etc` gives away what it holds. Whatever cannot be copied is refused before anything
is written.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from quant_kernels.loading.files import create, make_parents
from quant_kernels.loading.folder import CONFIG_NAME, INDEX_NAME, MODELOPT_NAME
from quant_kernels.loading.headers import check_name
from quant_kernels.loading.sinks import FileSink
from quant_kernels.loading.within import allowed_roots, kind_of, open_plain, real_path
from quant_spec.errors import LoadError, shown

WEIGHT_SUFFIXES: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
)
"""Other forms of the weights, which would no longer fit the config: they are not copied."""
SKIPPED_FOLDERS: Final = frozenset({"__pycache__"})
"""Folders that are not copied, beside hidden ones."""
_INDEX_SUFFIXES: Final = (".safetensors.index.json", ".bin.index.json")
MAX_DEPTH: Final = 32
"""Most folders within each other that are copied."""
_CHUNK: Final = 1 << 20


class FileBeside(NamedTuple):
    """A file that is copied.

    Attributes:
        name: relative to the checkpoint folder.
        path: where it really lies.
        nbytes: its size when it was found.
    """

    name: str
    path: Path
    nbytes: int


def files_beside(folder: Path) -> tuple[FileBeside, ...]:
    """Return the files of a checkpoint folder that are neither weights nor replaced, in order of their names.

    Raises:
        LoadError: one of them is a link out of the folder, a link to a folder, or no plain file; a folder cannot be
            read; a name holds control characters.
    """
    roots = allowed_roots(folder)
    found: list[FileBeside] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        for name in _listed(folder, below):
            if Path(name).suffix in WEIGHT_SUFFIXES or _is_replaced(name):
                continue
            check_name(name, str(folder))
            mode = os.lstat(folder / name).st_mode
            if stat.S_ISDIR(mode):
                leaf = name.rpartition("/")[2]
                if leaf in SKIPPED_FOLDERS or leaf.startswith("."):
                    continue
                if name.count("/") >= MAX_DEPTH:
                    message = f"{folder}: {shown(name)}: more than {MAX_DEPTH} folders within each other"
                    raise LoadError(message)
                waiting.append(name)
                continue
            real = real_path(folder, name, roots) if stat.S_ISLNK(mode) else folder / name
            found.append(_checked(folder, name, real, is_link=stat.S_ISLNK(mode)))
    return tuple(sorted(found))


def _listed(folder: Path, below: str) -> list[str]:
    try:
        return [f"{below}/{each.name}".lstrip("/") for each in (folder / below).iterdir()]
    except OSError as error:
        message = f"{folder / below}: cannot be read: {error.strerror or error}"
        raise LoadError(message) from error


def _checked(folder: Path, name: str, real: Path, *, is_link: bool) -> FileBeside:
    try:
        found = real.stat()
    except OSError as error:
        message = f"{folder}: {shown(name)} cannot be read: {error.strerror or error}"
        raise LoadError(message) from error
    if not stat.S_ISREG(found.st_mode):
        kind = f"a link to {kind_of(found.st_mode)}" if is_link else kind_of(found.st_mode)
        message = f"{folder}: {shown(name)} is {kind}; only plain files can be copied into the output"
        raise LoadError(message)
    return FileBeside(name, real, found.st_size)


def _is_replaced(name: str) -> bool:
    return name.endswith(_INDEX_SUFFIXES) or name in {CONFIG_NAME, INDEX_NAME, MODELOPT_NAME}


def copy_file(file: FileBeside, folder: Path) -> None:
    """Copy one file to its name in another folder; permissions are not copied.

    Raises:
        LoadError: it has become something else, or cannot be read.
        OSError: it cannot be written.
    """
    make_parents(folder, file.name)
    try:
        source = open_plain(file.path, file.name)
    except FileNotFoundError:
        message = f"{file.name}: it was removed while the job ran"
        raise LoadError(message) from None
    with source:
        found = os.fstat(source.fileno()).st_size
        if found != file.nbytes:
            message = f"{file.name}: it was changed while the job ran: {file.nbytes} bytes before, {found} now"
            raise LoadError(message)
        # Permissions do not go along: files in a hub cache or a package may be read-only.
        descriptor = create(folder / file.name)
        try:
            sink, at = FileSink(descriptor), 0
            while chunk := source.read(_CHUNK):
                sink.write(memoryview(chunk), at)
                at += len(chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
