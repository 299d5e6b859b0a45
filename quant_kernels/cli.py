"""The command line `quant-spec`: what happens around a command. The commands are in `quant_kernels.commands`.

Exit codes of every command: `quant_kernels.commands.console.ExitCode`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from quant_kernels.commands.streams import LastingFile, harden

if TYPE_CHECKING:
    from types import FrameType

    import typer

INTERRUPTED: Final = 130
"""Exit code after SIGINT; `ExitCode.INTERRUPTED`, which is not imported yet when it may be needed."""


def main() -> None:
    """Run the command line."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        # Nothing has begun that would have to be cleaned up, and an import cut short leaves a traceback.
        signal.signal(signal.SIGINT, _leave)
    output, _ = harden()
    from quant_kernels.commands.app import app

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as done:
        sys.exit(_exit_code(done.code, output))


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """End the process at once."""
    os._exit(INTERRUPTED)


def _exit_code(code: str | int | None, output: LastingFile) -> str | int | None:
    """Return the exit code once all that was printed has left; a reader of a pipe that has gone is no error."""
    from quant_kernels.commands.console import ExitCode

    sys.stdout.flush()
    if output.error is None or isinstance(output.error, BrokenPipeError):
        return code
    sys.stderr.write(f"error: standard output cannot be written: {output.error.strerror}\n")
    return code or ExitCode.UNSAID


def __getattr__(name: str) -> typer.Typer:
    """Return `app`, the commands, once it is asked for."""
    if name == "app":
        from quant_kernels.commands.app import app

        return app
    raise AttributeError(name)


if __name__ == "__main__":
    main()
