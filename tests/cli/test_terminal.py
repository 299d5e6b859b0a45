"""On a terminal: nothing wider than it, colours where they are wanted, progress that goes away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from command_line import PROGRAM, RECIPE, REQUEST, Shell
from terminal import CONTROL, on_a_terminal, plain
from typer.testing import CliRunner

from quant_kernels.cli import app
from quant_kernels.commands.progress import ShownProgress
from quant_spec.report_file import read_report

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "plan": ("plan", "model", REQUEST, RECIPE.replace('"lm_head"', '"lm_haed"')),
    "plan --verbose": ("plan", "tied", REQUEST, RECIPE, "--verbose"),
    "validate": ("validate", RECIPE),
}
COLOUR = re.compile(r"\x1b\[(?:3[0-9]|9[0-7]|38;[0-9;]+)m")


def too_wide(written: str, columns: int) -> list[str]:
    """Return the lines that a terminal would break."""
    return [line for line in plain(written) if len(line.rstrip()) > columns]


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.usefixtures("model", "tied", "shell")
def test_nothing_is_wider_than_the_terminal(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, written = on_a_terminal([*PROGRAM, *arguments], tmp_path, columns=80)
    assert code == 0, written
    assert len(written) > 100
    assert too_wide(written, 80) == []


@pytest.mark.usefixtures("model", "shell")
def test_colours_are_for_terminals_that_want_them(tmp_path: Path, shell: Shell) -> None:
    arguments = COMMANDS["plan"]
    _, coloured = on_a_terminal([*PROGRAM, *arguments], tmp_path, columns=80)
    assert COLOUR.search(coloured)
    _, bare = on_a_terminal([*PROGRAM, *arguments], tmp_path, columns=80, NO_COLOR="1")
    assert not COLOUR.search(bare)
    piped = shell(f"quant-spec plan model {REQUEST} '{arguments[3]}'")
    assert not CONTROL.search(piped.stdout)
    assert "warning: " in piped.stdout


@pytest.mark.parametrize(
    "command", ["plan", "explain", "quantize", "report", "compare", "validate", "resolve", "kernels"]
)
def test_help_fits(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert too_wide(shown.stdout, 80) == []


@pytest.mark.usefixtures("model", "shell")
def test_job(tmp_path: Path) -> None:
    command = [*PROGRAM, "quantize", "model", REQUEST, RECIPE, "--output", "out", "--html"]
    code, written = on_a_terminal(command, tmp_path, columns=80)
    assert code == 0, written
    assert too_wide(written, 80) == []
    # The bar shows sizes, and is erased before the table is written: up a line, which is cleared.
    bar, _, rest = written.rpartition("━")
    assert "KiB" in bar
    assert re.search(r"\x1b\[1A\x1b\[2K", rest)
    # The log's summary is folded.
    (path,) = tmp_path.glob("online_quant_info_*.json")
    summary = read_report(path).summary()
    assert len(summary) > 80
    assert summary in " ".join(" ".join(plain(written)).split())


def test_a_quiet_job_has_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ShownProgress(quiet=True) as progress:
        progress.start(10)
        progress.advance(10, "x")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["bash", "fish"])
def test_completion_can_be_installed(shell: Shell, name: str) -> None:
    done = shell(f"quant-spec --show-completion {name}", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    assert "_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("quant-spec q", ["quantize"]),
        ("quant-spec plan --on-unmatched ", ["warn", "error"]),
        ("quant-spec quantize --export-format c", ["compressed-tensors"]),
    ],
)
def test_completion(shell: Shell, words: str, found: list[str]) -> None:
    done = shell(
        "quant-spec",
        _QUANT_SPEC_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split(" ")) - 1),
    )
    assert done.stdout.split() == found, done.stderr
