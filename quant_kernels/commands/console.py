"""What all commands share: reading documents, printing, and turning refusals into one message and an exit code."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import textwrap
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from quant_spec.documents import load_json
from quant_spec.errors import ConfigError, Defect, QuantSpecError, shown
from quant_spec.report import ReportError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

STDIN: Final = "-"
_JSON_STARTS: Final = ("{", "[", '"', "\u201c", "\u201d", "\u201e", "\u2018", "\u2019", "\u00ab")
"""What JSON text starts with, typographic quotes among it: the parser says what is wrong with those."""
_WORDS: Final = frozenset({"null", "true", "false", ""})
_WIDTH: Final = 80


class ExitCode(IntEnum):
    """Exit codes of every command.

    Attributes:
        OK: done.
        REFUSED: the input was refused; one message says what, where, and what is allowed. Nothing was made.
        USAGE: the command was called wrongly.
        SELF_TEST_FAILED: kernels and reference differ.
        UNSAID: the work is done and complete, but its report, or the answer on standard output, could not be written.
        INTERRUPTED: stopped by SIGINT.
    """

    OK = 0
    REFUSED = 1
    USAGE = 2
    SELF_TEST_FAILED = 3
    UNSAID = 4
    INTERRUPTED = 130
    TERMINATED = 143


@contextmanager
def refusals(*, as_json: bool) -> Iterator[None]:
    """Turn errors that were foreseen into a message and an exit code; no traceback.

    Args:
        as_json: also print `{"error": …, "defects": […]}` to standard output.
    """
    try:
        yield
    except ReportError as error:
        fail(str(error), as_json=as_json, code=ExitCode.UNSAID)
    except QuantSpecError as error:
        fail(str(error), as_json=as_json, defects=error.defects if isinstance(error, ConfigError) else ())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", as_json=as_json)
    except MemoryError:
        fail("out of memory", as_json=as_json)


def fail(message: str, *, as_json: bool, defects: tuple[Defect, ...] = (), code: ExitCode = ExitCode.REFUSED) -> None:
    """Print an error and leave with an exit code."""
    print_error(message)
    if as_json:
        listed = [
            {
                "path": defect.path,
                "problem": defect.problem,
                "value": shown(defect.value),
                "expected": list(defect.expected),
                "hint": defect.hint,
            }
            for defect in defects
        ]
        print_json({"error": message, "defects": listed})
    raise typer.Exit(code)


def print_error(message: str) -> None:
    """Print an error to standard error; `error:` is red on a terminal that wants colours."""
    if sys.stderr.isatty():
        from rich.text import Text

        console(stderr=True).print(Text("error:", style="bold red"), end=" ")
    else:
        sys.stderr.write("error: ")
    sys.stderr.write(f"{printable(message)}\n")


def printable(text: str) -> str:
    """Return `text` without what a terminal would obey or cannot show: escapes and lone surrogates."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


def print_json(document: object) -> None:
    """Print a document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """Print a line to standard output."""
    sys.stdout.write(f"{printable(text)}\n")


def print_log(text: str, style: str | None = None, *, indent: int = 2) -> None:
    """Print a line of the log: as one line, but on a terminal folded at words to its width.

    Args:
        text: the line.
        style: rich's word for its colour, on terminals that want colours.
        indent: columns before the folded lines below the first.
    """
    if not sys.stdout.isatty():
        print_line(text)
        return
    from rich.text import Text

    screen = console()
    lines = textwrap.wrap(printable(text), screen.width, subsequent_indent=" " * indent, break_on_hyphens=False)
    screen.print(Text("\n".join(lines), style=style or ""))


def print_rich(what: RenderableType) -> None:
    """Print a table to standard output: as wide as the terminal, else 120 columns."""
    console().print(what)


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or standard error."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH + _WIDTH // 2
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def read_request(given: str, option: str) -> object:
    """Return a request or config given as JSON text, as a path, or as `-` for standard input.

    Args:
        given: the text.
        option: what messages call it when it is no file.

    Raises:
        ConfigError: it is no valid JSON.
        QuantSpecError: it is neither JSON nor a file.
    """
    if given == STDIN:
        return load_json(read_stdin(option), "<stdin>")
    text = given.strip()
    if text.startswith(_JSON_STARTS) or text in _WORDS:
        return load_json(given, option)
    path = Path(given)
    try:
        found = path.is_file()
    except (OSError, ValueError):
        found = False
    if not found:
        kind = "is a folder" if path.is_dir() else "no such file"
        example = '{"global_quant_config": "ptpc_fp8"}'
        message = f"{option}: {shown(given)}: {kind}; allowed: JSON text such as '{example}', a file, or -"
        raise QuantSpecError(message)
    return load_json(path.read_bytes(), str(path))


def read_stdin(what: str) -> bytes:
    """Return all of standard input.

    Args:
        what: what messages call that which is read from it.

    Raises:
        QuantSpecError: it is closed.
    """
    if sys.stdin is None:
        message = f"{what}: standard input is closed"
        raise QuantSpecError(message)
    return sys.stdin.buffer.read()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector: a plan makes hundreds of thousands of objects, none of which is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def imports() -> Iterator[None]:
    """Let SIGINT end the process at once: for imports that take seconds, before anything was made."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
