"""Closed streams, readers that leave, full disks and interruptions during start-up: one line at most, no traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from command_line import PROGRAM, RECIPE, REQUEST, Shell

from quant_kernels.commands.console import ExitCode
from quant_kernels.commands.streams import LastingFile
from quant_spec.report import QuantReport

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = {
    "help": "quant-spec --help",
    "resolve": f"echo model.layers.0.mlp.up_proj | quant-spec resolve '{RECIPE}'",
    "plan": f"quant-spec plan model {REQUEST} '{RECIPE}'",
    "plan --json": f"quant-spec plan model {REQUEST} '{RECIPE}' --json",
}
every_command = pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)


@every_command
@pytest.mark.usefixtures("model")
def test_closed_streams(shell: Shell, line: str) -> None:
    done = shell(f"{line} >&-; echo $? >&2")
    assert done.stderr == "0\n"


@every_command
@pytest.mark.usefixtures("model")
def test_reader_that_leaves(shell: Shell, line: str) -> None:
    done = shell(f"set -o pipefail; {{ sleep 0.01; {line}; }} | true; echo ${{PIPESTATUS[0]}} >&2")
    assert done.stderr == "0\n"


@every_command
@pytest.mark.usefixtures("model")
def test_full_disk_below_standard_output(shell: Shell, line: str) -> None:
    done = shell(f"{line} >/dev/full")
    assert done.returncode == ExitCode.UNSAID
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("quant-spec validate -", "DOCUMENT"),
        (f"quant-spec plan model {REQUEST} -", REQUEST),
        (f"quant-spec resolve '{RECIPE}'", "NAMES"),
    ],
)
@pytest.mark.usefixtures("model")
def test_closed_standard_input(shell: Shell, line: str, what: str) -> None:
    done = shell(f"{line} <&-")
    assert (done.returncode, done.stderr) == (ExitCode.REFUSED, f"error: {what}: standard input is closed\n")


def test_job_goes_on_when_nobody_reads_its_progress(shell: Shell, model: Path, tmp_path: Path) -> None:
    done = shell(f"{{ quant-spec quantize {model} {REQUEST} '{RECIPE}' --output out 2>&1; echo $? >code; }} | true")
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(list(tmp_path.glob("online_quant_info_*.json"))) == 1


def test_files_do_not_get_the_numbers_of_closed_streams(shell: Shell, tmp_path: Path) -> None:
    report = QuantReport(model="m", online_quant_config={}, elapsed_seconds=1.0, layers=(), warnings=("look",))
    path = report.write(tmp_path)
    assert shell(f"quant-spec report {path.name} --html page.html <&- >&- 2>&-").returncode == 0
    assert shell(f"quant-spec report {path.name} --html other.html --quiet").stderr == "warning: look\n"
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "other.html").read_bytes()


def test_lasting_file_keeps_the_first_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        lasting = LastingFile(file.fileno())
        assert (lasting.write(b""), lasting.write(b"abc")) == (0, 3)
        assert (lasting.error, lasting.isatty(), lasting.writable()) == (None, False, True)
    assert (tmp_path / "file").read_bytes() == b"abc"
    assert lasting.write(b"abcd") == 4
    assert isinstance(lasting.error, OSError)


def test_reader_that_does_not_keep_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    lasting = LastingFile(writing)
    text = b"x" * (1 << 20)

    def write() -> None:
        with io.BufferedWriter(lasting) as buffered:
            buffered.write(text)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as reader:
        assert reader.read() == text
    writer.join()
    assert lasting.error is None


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.__stderr__.write("importing\\n")
            sys.__stderr__.flush()
            time.sleep(20)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ("--help",)),
        ("quant_spec", ("validate", RECIPE)),
        ("torch", ("quantize", "model", REQUEST, RECIPE, "--output", "out")),
        ("torch", ("kernels",)),
    ],
)
@pytest.mark.usefixtures("model")
def test_interrupt_while_modules_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "usercustomize").mkdir()
    (tmp_path / "usercustomize" / "sitecustomize.py").write_text(SLOW_IMPORT.format(module=module))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "usercustomize"))
    with subprocess.Popen(
        [*PROGRAM, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        output, errors = started.communicate(timeout=10)
    assert (started.returncode, output) == (ExitCode.INTERRUPTED, "")
    assert errors in {"", "interrupted\n"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "usercustomize"]
