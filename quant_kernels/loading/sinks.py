"""Where the bytes of a shard go: into a file, or beside what a file already holds."""

from __future__ import annotations

import os
from typing import Protocol

from quant_spec.errors import LoadError


class Sink(Protocol):
    """Takes the bytes of a file in any order, from several threads."""

    def write(self, memory: memoryview, offset: int) -> None:
        """Take all of `memory`, which belongs at byte `offset`."""
        ...


class FileSink:
    """Writes bytes into an open file."""

    def __init__(self, descriptor: int) -> None:
        """Take the file."""
        self._descriptor = descriptor

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of `memory` at byte `offset`.

        Raises:
            OSError: the device is full, or any other failure to write.
        """
        while memory.nbytes:
            count = os.pwrite(self._descriptor, memory, offset)
            memory, offset = memory[count:], offset + count


class DifferenceError(LoadError):
    """A file does not hold the bytes that it should."""


class ComparingSink:
    """Reads an open file and compares it with the bytes that belong there."""

    def __init__(self, descriptor: int, file: str) -> None:
        """Take the file and its name for messages."""
        self._descriptor = descriptor
        self._file = file

    def write(self, memory: memoryview, offset: int) -> None:
        """Compare all of `memory` with what stands at byte `offset`.

        Raises:
            DifferenceError: it differs, or the file ends before.
            OSError: the file cannot be read.
        """
        found = bytearray(memory.nbytes)
        left, at = memoryview(found), offset
        while left.nbytes and (count := os.preadv(self._descriptor, [left], at)):
            left, at = left[count:], at + count
        if left.nbytes or found != memory:
            message = f"{self._file}: bytes {offset} to {offset + memory.nbytes} are not those that were written"
            raise DifferenceError(message)
