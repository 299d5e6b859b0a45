"""Progress of what takes longer than a moment, on standard error: how far, how fast, how long still."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from quant_kernels.commands.console import console, printable

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, ProgressColumn, TaskID

_TENTHS: Final = 10
_SECONDS_BETWEEN_LINES: Final = 1.0
_WARM_UP: Final = 0.25
"""Seconds at the start that do not count for the rate: what an earlier run has done is taken up in them."""
_NAME_WIDTH: Final = 26
_MINUTE: Final = 60
_HOUR: Final = 3600


class ShownProgress:
    """A bar on a terminal; elsewhere a line at every tenth, at most one a second, and one at the end."""

    def __init__(self, *, quiet: bool, in_bytes: bool = True) -> None:
        """Take what is to be shown.

        Args:
            quiet: True to show nothing.
            in_bytes: True if amounts are bytes, else they are counted in steps.
        """
        self._quiet = quiet
        self._in_bytes = in_bytes
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._done = 0
        self._said = 0
        self._started = self._last = time.perf_counter()
        self._rated_from: tuple[float, int] | None = None

    def __enter__(self) -> ShownProgress:  # noqa: PYI034  (typing.Self needs Python 3.11)
        """Show a bar if standard error is a terminal."""
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import Progress

            self._bar = Progress(*self._columns(), console=console(stderr=True), transient=True, expand=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        amounts = (
            [DownloadColumn(binary_units=True), TransferSpeedColumn()] if self._in_bytes else [MofNCompleteColumn()]
        )
        return [TextColumn("{task.description}", markup=False), BarColumn(None), *amounts, TimeRemainingColumn()]

    def start(self, total: int) -> None:
        """Take the amount of the whole job."""
        self._total = total
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total)

    def advance(self, nbytes: int, name: str) -> None:
        """Take what is done, in bytes or steps, and its name."""
        self._done += nbytes
        if self._bar is not None and self._task is not None:
            text = printable(name)
            short = text if len(text) <= _NAME_WIDTH else f"…{text[1 - _NAME_WIDTH :]}"
            self._bar.update(self._task, advance=nbytes, description=short.ljust(_NAME_WIDTH))
        elif not self._quiet:
            self._say(name)

    def _say(self, name: str) -> None:
        now = time.perf_counter()
        if self._rated_from is None and now - self._started > _WARM_UP:
            self._rated_from = now, self._done
        tenth = self._done * _TENTHS // max(1, self._total)
        if tenth <= self._said or (self._done < self._total and now - self._last < _SECONDS_BETWEEN_LINES):
            return
        self._said, self._last = tenth, now
        share = self._done / max(1, self._total)
        done = f"{share:4.0%} of {self._amount(self._total)}, {duration(now - self._started)}"
        sys.stderr.write(f"{done}{self._forecast(now)}: {printable(name)}\n")

    def _forecast(self, now: float) -> str:
        """Return the rate, and the time left at that rate, as far as they can be known."""
        since, before = self._rated_from or (now, self._done)
        if now <= since or self._done <= before:
            return ""
        rate = (self._done - before) / (now - since)
        left = f", {duration((self._total - self._done) / rate)} left" if self._done < self._total else ""
        return f", {self._amount(int(rate))}/s{left}"

    def _amount(self, count: int) -> str:
        from quant_spec.report_table import human_bytes

        return human_bytes(count) if self._in_bytes else f"{count:,}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [duration(each) for each in (0.04, 12.3, 75, 4000)]
    ['0.0 s', '12.3 s', '1 min 15 s', '1 h 06 min']
    """
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{int(seconds) // _MINUTE} min {int(seconds) % _MINUTE:02d} s"
    return f"{int(seconds) // _HOUR} h {int(seconds) % _HOUR // _MINUTE:02d} min"
