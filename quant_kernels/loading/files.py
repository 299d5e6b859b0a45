"""Small files that are there whole or not at all, and a folder that one process at a time may write."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from quant_spec import LoadError

if TYPE_CHECKING:
    from pathlib import Path

_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_MODE: Final = 0o644


def create(path: Path, *, empty: bool = True) -> int:
    """Open a file for reading and writing, made if it is missing; a link is not followed.

    Args:
        path: the file.
        empty: True to cut it to no bytes.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, _CREATE | (os.O_TRUNC if empty else 0), _MODE)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name, make sure that it is on disk, then give it its own.

    Raises:
        OSError: it cannot be written; the other name does not stay.
    """
    scratch = path.with_name(f"{path.name}.new")
    descriptor = create(scratch)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        scratch.unlink(missing_ok=True)
        raise
    os.close(descriptor)
    scratch.replace(path)


def make_parents(root: Path, name: str) -> None:
    """Make the folders between `root`, which must be there, and a file below it.

    Raises:
        OSError: one cannot be made.
    """
    folder = root
    for part in name.split("/")[:-1]:
        folder /= part
        folder.mkdir(exist_ok=True)


def read_json(path: Path) -> object:
    """Return the JSON document in a file of our own; None if it is missing or cut short."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


class Claim:
    """A lock on a file that ends with the process, however it ends.

    Two processes on hosts that share the file system see each other as far as that passes on `flock`, as NFS does.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Args:
            path: the file, made if it is missing; its folder must be there.

        Raises:
            LoadError: another process has it; the message says which.
            OSError: the file cannot be made.
        """
        self._descriptor = create(path, empty=False)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 200).decode("utf-8", "replace").strip()
            os.close(self._descriptor)
            who = f" ({holder})" if holder.isprintable() and holder else ""
            message = f"{path.parent}: another process is writing it{who}; wait for it, or choose another output"
            raise LoadError(message) from error
        if not self._is_ours(path):
            # The holder before us removed it between our opening it and its release.
            os.close(self._descriptor)
            message = f"{path.parent}: another process has just finished with it; start again"
            raise LoadError(message)
        # For the message that others give; the lock holds without it.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _is_ours(self, path: Path) -> bool:
        try:
            there = path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def release(self) -> None:
        """Give the lock back; harmless when it was."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
