"""Files of a checkpoint folder, opened only where they lie in it: no link leads out, no device and no pipe is read.

In a hub cache, whose snapshots are links into `blobs`, a file may lie there too. What is opened is what was checked:
the path is resolved once, the last part of the resolved one is not followed again, and opening never waits.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple

from quant_spec.errors import LoadError, shown

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

MAX_JSON_BYTES: Final = 256 << 20
"""Largest config.json or index that is read; a million tensors take about 100 MB."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was looked at.

    Attributes:
        size: bytes.
        mtime_ns: time of the last change, nanoseconds.
        inode: its number in the file system.
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Stamp:
        """Return the stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return the real folders in which the files of a checkpoint folder may lie."""
    real = folder.resolve()
    roots = [real]
    # The hub's cache: models--X/snapshots/REVISION/FILE is a link to models--X/blobs/DIGEST.
    if real.parent.name == "snapshots":
        roots.append(real.parent.parent / "blobs")
    return tuple(roots)


def real_path(folder: Path, name: str, roots: tuple[Path, ...]) -> Path:
    """Return where a file really lies; links within the allowed folders are followed.

    Args:
        folder: the checkpoint folder.
        name: the file, relative to it.
        roots: as `allowed_roots` gives them.

    Raises:
        LoadError: a link leads out of the allowed folders or in a circle.
    """
    try:
        # Python 3.13 follows a circle of links as far as it can without an error; opening it then fails.
        real = (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        message = f"{folder}: {shown(name)} cannot be followed: {error}"
        raise LoadError(message) from None
    if not any(real.is_relative_to(root) for root in roots):
        message = f"{folder}: {shown(name)} is a link to {real}, outside the checkpoint folder"
        raise LoadError(message)
    return real


def open_plain(path: Path, where: str) -> BufferedReader:
    """Open a plain file for reading; never waits for the other end of a pipe.

    Args:
        path: the real path; its last part is not followed if it is a link.
        where: what messages call it.

    Raises:
        FileNotFoundError: there is none.
        LoadError: it is no plain file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        message = f"{where}: cannot be read: {error.strerror or error}"
        raise LoadError(message) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        message = f"{where}: a plain file is required, found {kind_of(mode)}"
        raise LoadError(message)
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, where: str, *, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a small plain file.

    Args:
        path: the real path.
        where: what messages call it.
        limit: most bytes that are read.

    Raises:
        FileNotFoundError: there is none.
        LoadError: it is no plain file, too large, or cannot be read.
    """
    with open_plain(path, where) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            message = f"{where}: {size} bytes; at most {limit} are read"
            raise LoadError(message)
        try:
            return stream.read(limit)
        except OSError as error:
            message = f"{where}: cannot be read: {error.strerror or error}"
            raise LoadError(message) from error


def kind_of(mode: int) -> str:
    """Return what a file is that is no plain one: a folder, a device, a pipe, a socket."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")
