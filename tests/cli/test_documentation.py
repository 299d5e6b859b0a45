"""What the pages say of the command line: every option, every exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from quant_kernels.cli import app
from quant_kernels.commands.console import ExitCode

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group has them


def test_every_option_of_quantize_is_explained() -> None:
    page = (DOCS / "how-to" / "quantize-a-checkpoint.md").read_text("utf-8")
    options = {name for parameter in COMMANDS["quantize"].params for name in parameter.opts if name.startswith("--")}
    assert len(options) > 8
    assert {name for name in options - {"--help"} if name not in page} == set()


def test_every_exit_code_is_explained() -> None:
    page = (DOCS / "reference" / "cli.md").read_text("utf-8")
    codes = re.findall(r"^\| (\d+) \| ", page[page.index("## Exit codes") :], re.MULTILINE)
    assert list(map(int, codes)) == list(ExitCode)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_reference(name: str) -> None:
    page = (DOCS / "reference" / "cli.md").read_text("utf-8")
    assert f"```{{cli-help}} {name}\n" in page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_accepts(name: str) -> None:
    epilog = str(COMMANDS[name].epilog)
    examples = re.findall(r"quant-spec (\S+)(.*(?:\\\n.*)?)", epilog)
    assert examples, epilog
    for command, words in examples:
        assert command == name
        given = set(re.findall(r"--[\w-]+", words))
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert given <= known, given - known


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_whole_sentences(name: str) -> None:
    command = COMMANDS[name]
    assert "..." not in command.get_short_help_str(100)
    assert len(str(command.short_help)) <= 60
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
