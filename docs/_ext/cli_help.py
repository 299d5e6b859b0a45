"""The directive `cli-help`: what `quant-spec COMMAND --help` prints, taken from the command while the page is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

COMMAND = Path(sys.executable).with_name("quant-spec")


class CliHelp(SphinxDirective):
    """A literal block with the help of the subcommand that the argument names; without one, of the program."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Run the command; a command that fails makes the build fail."""
        environment = os.environ | {"COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"}
        command = [str(COMMAND), *self.arguments, "--help"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
        if result.returncode:
            raise self.error(f"{' '.join(command)} failed: {result.stderr}")
        text = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("cli-help", CliHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
