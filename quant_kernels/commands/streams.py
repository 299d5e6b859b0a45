"""Standard streams that nothing can trip over: closed ones, readers that leave early, full disks, plain ASCII."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

STDOUT: Final = 1
STDERR: Final = 2


class LastingFile(io.RawIOBase):
    """A file descriptor that is written to until the first error, which is kept; what comes later goes nowhere.

    So a job goes on when nobody reads its progress any more, and its exit code says at the end what was lost.

    Attributes:
        error: the first error, or None.
    """

    def __init__(self, number: int) -> None:
        """Take a file descriptor, which stays open."""
        super().__init__()
        self.error: OSError | None = None
        self._number = number

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return os.isatty(self._number)

    def write(self, data: Buffer, /) -> int:
        """Write some bytes; return how many were taken."""
        size = memoryview(data).nbytes
        while size and self.error is None:
            written = self._try(data)
            if written:
                return written
        return size

    def _try(self, data: Buffer) -> int:
        """Write some bytes; return how many, 0 after an error or a wait."""
        try:
            return os.write(self._number, data)
        except BlockingIOError:
            # The other end made it non-blocking, and does not keep up.
            select.select((), (self._number,), ())
        except OSError as error:
            self.error = error
        return 0


def harden() -> tuple[LastingFile, LastingFile]:
    """Replace standard output and standard error of this process by lasting ones, whatever the caller closed.

    Closed ones become /dev/null: otherwise the first files to be opened would get their numbers, and what is printed
    would go into those files. Characters that the encoding lacks are written as escapes.

    Returns:
        Standard output and standard error.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        continue
    os.close(number)
    found = []
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        old = getattr(sys, name)
        raw = LastingFile(number)
        encoding = "utf-8" if old is None else old.encoding
        if old is not None:
            old.flush()
        line_by_line = number == STDERR or raw.isatty()
        buffered = io.BufferedWriter(raw)
        stream = io.TextIOWrapper(buffered, encoding, errors="backslashreplace", line_buffering=line_by_line)
        setattr(sys, name, stream)
        found.append(raw)
    return found[0], found[1]
