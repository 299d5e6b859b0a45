"""A process of the command line, and a small checkpoint for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_line import PROGRAM, Shell, tensors, write_model


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run lines of bash in the test's folder."""
    for name in ("QUANT_SPEC_REPORT_DIR", "ATOM_TORCH_PROFILER_DIR", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        script = f'quant-spec() {{ "{PROGRAM[0]}" "$@"; }}\n{line}'
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint with an output head of its own."""
    return write_model(tmp_path / "model", tensors())


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Return a checkpoint whose output head is its embedding."""
    return write_model(tmp_path / "tied", tensors(head=False), tie_word_embeddings=True)
