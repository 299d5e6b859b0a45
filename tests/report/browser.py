"""A headless Chromium that tests drive through a pipe, with the DevTools protocol: no package, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

Message = dict[str, object]
TIMEOUT = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers; pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def executable() -> str:
    """Return the path of Debian's `chromium`.

    Raises:
        RuntimeError: it is not installed, which is a failure: the page is only known to work where it was seen.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "no Chromium is installed, and the report's page is tested in it: apt-get install chromium"
        raise RuntimeError(message)
    return found


def _high(descriptor: int) -> int:
    """Return a duplicate of a descriptor with a number from 10 on; the old one is closed."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return found


def _is_loaded(event: Message, loader: object) -> bool:
    if event.get("method") != "Page.lifecycleEvent":
        return False
    said = cast("Message", event["params"])
    return (said["loaderId"], said["name"]) == (loader, "load")


class Browser:
    """One page in a browser of its own; use as a context manager.

    Attributes:
        events: what the browser reported, as `Network.requestWillBeSent`.
    """

    def __init__(self, profile: Path) -> None:
        """Start it with an empty profile."""
        self.events: list[Message] = []
        self._buffer = b""
        self._next = 0
        commands, self._commands = map(_high, os.pipe())
        self._answers, answers = map(_high, os.pipe())
        # The protocol's descriptors are 3 and 4, which those of the pipes must not be.
        line = f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session: str | None = None
        targets = cast("list[Message]", self.call("Target.getTargets")["targetInfos"])
        page = next(each for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def call(self, method: str, **parameters: object) -> Message:
        """Call a method of the protocol and return its result."""
        self._next += 1
        message: Message = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return cast("Message", answer["result"])
            self.events.append(answer)

    def _read(self) -> Message:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        return cast("Message", json.loads(text))

    def open(self, address: str) -> None:
        """Load a page and wait until it is there."""
        self.events.clear()
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while not any(_is_loaded(event, loader) for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> object:
        """Return the value of a JavaScript expression, which the tool runs beside the page's own policy."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return cast("Message", answer["result"]).get("value")

    def press(self, key: str, text: str = "", *, shift: bool = False) -> None:
        """Press and release a key, named as in `KeyboardEvent.key`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "/": 191}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Enter text where the focus is."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page and whether the reader prefers dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return what is seen as PNG."""
        return base64.b64decode(str(self.call("Page.captureScreenshot", format="png")["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since it was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(cast("Message", cast("Message", event["params"])["request"])["url"]) for event in sent]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the page's console."""
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]
