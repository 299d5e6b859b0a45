"""Fuzz the command line: arguments, and what stands on standard input, for every command that converts no weights.

    python tests/torture/fuzz_cli.py [--runs N] [--seconds N] [--seed N] [--unguided]

An input is `{"arguments": […], "input": "…"}`. The command runs in this process, in a folder with a small model; it
must end with one of the documented exit codes, and no exception may leave it.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuzzing import FindingError, Target, main

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST: Final = '{"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"]}'
COMMANDS: Final = ("validate", "plan", "explain", "resolve", "report", "kernels", "--help", "--version")
LINES: Final = (
    ["validate", REQUEST],
    ["validate", "request.json", "--json"],
    ["validate", "-"],
    ["plan", "model", "--online-quant-config", REQUEST],
    ["plan", "model", "--online-quant-config", "request.json", "--json", "--tp", "2"],
    ["plan", "model", "--verbose"],
    ["explain", "model", "model.layers.0.mlp.up_proj", "--online-quant-config", REQUEST],
    ["explain", "model", "lm_head", "--json"],
    ["resolve", REQUEST, "--json"],
    ["resolve", "request.json", "--source", "model"],
    ["report", "report.json"],
    ["kernels", "--json"],
    ["--version"],
    ["plan", "--help"],
)


def seeds() -> list[bytes]:
    """Return each command with good arguments."""
    names = "model.layers.0.mlp.up_proj\nlm_head\n"
    return [json.dumps({"arguments": line, "input": REQUEST if "-" in line else names}).encode() for line in LINES]


def load() -> list[Target]:
    """Return the target."""
    return [Target("cli", _target(), seeds)]


def _folder() -> Path:
    outer = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, outer, ignore_errors=True)
    model = outer / "model"
    model.mkdir()
    names = ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate", "lm_head")
    header = {
        f"{name}.weight": {"dtype": "BF16", "shape": [32, 32], "data_offsets": [2048 * index, 2048 * index + 2048]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(2048 * len(names)))
    (model / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}', "utf-8")
    (outer / "request.json").write_text(REQUEST, "utf-8")
    (outer / "report.json").write_text("{}", "utf-8")
    return outer


def _target() -> Callable[[bytes], str]:
    from typer.testing import CliRunner

    from quant_kernels.commands.app import app
    from quant_kernels.commands.console import ExitCode

    outer = _folder()
    runner = CliRunner()
    known = {int(code) for code in ExitCode}

    def run(data: bytes) -> str:
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            return "no input"
        if not isinstance(given, dict) or not isinstance(given.get("arguments"), list):
            return "no input"
        arguments = [each for each in given["arguments"] if isinstance(each, str)]
        if not arguments or arguments[0] not in COMMANDS or any("\0" in each for each in arguments):
            return "no command"
        given_text = given.get("input") if isinstance(given.get("input"), str) else ""
        before = Path.cwd()
        os.chdir(outer)
        try:
            result = runner.invoke(app, arguments, input=given_text.encode("utf-8", "surrogatepass"))
        finally:
            os.chdir(before)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code not in known or "Traceback" in result.output:
            message = f"{arguments}: exit code {result.exit_code}\n{result.output[-2000:]}"
            raise FindingError(message)
        return f"exit code {result.exit_code}"

    return run


if __name__ == "__main__":
    sys.exit(main(__file__, load, "quant_kernels.commands"))
