"""Two type checkers over the package and over what they must infer and refuse; no `Any` in public signatures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import quant_spec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = [HERE / "public_types.py", HERE / "refused_types.py"]


def test_mypy_strict() -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--warn-unused-ignores",
        "--no-error-summary",
        *map(str, FILES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_sees_a_wrong_type(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from quant_spec import QuantKey\nx: int = QuantKey.parse('mxfp4')\n", "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Incompatible types in assignment" in done.stdout, done.stdout + done.stderr


def test_pyright() -> None:
    command = Path(sys.executable).with_name("basedpyright")
    if not command.exists():
        pytest.skip("basedpyright is not installed")
    arguments = [str(command), "--level", "error", "--project", str(HERE / "pyrightconfig.json")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def public_modules() -> list[str]:
    found = pkgutil.walk_packages(quant_spec.__path__, "quant_spec.")
    return [each.name for each in found if not any(part.startswith("_") for part in each.name.split("."))]


def holds_any(annotation: object) -> bool:
    if annotation is typing.Any:
        return True
    text = annotation if isinstance(annotation, str) else ""
    words = "".join(character if character.isalnum() or character == "_" else " " for character in text).split()
    return "Any" in words or any(holds_any(each) for each in typing.get_args(annotation))


def signatures(module: str) -> list[tuple[str, inspect.Signature]]:
    """The public functions of a module and the public methods of its public classes."""
    found: list[tuple[str, inspect.Signature]] = []
    loaded = importlib.import_module(module)
    for name, value in vars(loaded).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module:
            continue
        members = vars(value).items() if inspect.isclass(value) else [("", value)]
        for member, each in members:
            function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
            made = member == "__init__" and not getattr(value, "_is_protocol", False)
            if inspect.isfunction(function) and (made or not member.startswith("_")):
                found.append((f"{module}.{name}.{member}", inspect.signature(function)))
    return found


@pytest.mark.parametrize("module", public_modules())
def test_public_signatures_are_complete_and_without_any(module: str) -> None:
    for name, signature in signatures(module):
        parameters = [each for each in signature.parameters.values() if each.name not in {"self", "cls"}]
        for each in parameters:
            assert each.annotation is not inspect.Parameter.empty, f"{name}({each.name})"
            assert not holds_any(each.annotation), f"{name}({each.name}: {each.annotation})"
        assert not holds_any(signature.return_annotation), name
        assert signature.return_annotation is not inspect.Signature.empty or name.endswith(".__init__"), name


def test_the_signature_check_can_fail() -> None:
    assert holds_any("dict[str, Any] | None")
    assert holds_any(list[typing.Any])
    assert not holds_any("AnyString")
    assert len(signatures("quant_spec.plan")) >= 2


def test_every_export_is_documented() -> None:
    undocumented = [name for name in quant_spec.__all__ if name != "UNSET" and not getattr(quant_spec, name).__doc__]
    assert undocumented == []
