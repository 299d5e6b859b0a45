"""Every example in a docstring of the two packages gives what it says."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_with_examples() -> list[str]:
    """Dotted names of modules that hold at least one `>>>`."""
    found = []
    for package in ("quant_spec", "quant_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text("utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_module(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed


def test_a_wrong_example_fails(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = doctest.DocTestFinder().find("\n>>> 1 + 1\n3\n", "wrong", module=False)
    assert doctest.DocTestRunner().run(example).failed == 1
    assert "Expected:\n    3" in capsys.readouterr().out


def test_public_names_have_docstrings() -> None:
    """Ruff checks those that are defined here; this checks that what the package exports is among them."""
    for package in ("quant_spec", "quant_kernels"):
        module = importlib.import_module(package)
        assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text("utf-8")))
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert value.__doc__, f"{package}.{name}"
