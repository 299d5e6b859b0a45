"""A terminal for the command line: what a program writes when it is not redirected."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(command: Sequence[str], folder: Path, *, columns: int, **environment: str) -> tuple[int, str]:
    """Run a program on a terminal of 40 lines.

    Args:
        command: program and arguments.
        folder: where it runs.
        columns: width of the terminal.
        environment: set for it, beside the test's own.

    Returns:
        Its exit code, and all that it wrote.
    """
    child, terminal = pty.fork()
    if child == 0:
        _become(command, folder, environment, columns)
    written = bytearray()
    while True:
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not more:
            break
        written += more
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), written.decode()


def _become(command: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int) -> None:
    """Replace this forked process by the program."""
    try:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.chdir(folder)
        os.execvpe(command[0], [*command], {**os.environ, "TERM": "xterm-256color", **environment})  # noqa: S606
    finally:
        os._exit(127)


def plain(written: str) -> list[str]:
    """Return lines without control sequences; of what is written over itself, each version."""
    return re.split(r"[\r\n]+", CONTROL.sub("", written))
