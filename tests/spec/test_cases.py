"""The case corpus, one test a file. `--cases-dir DIR` runs any other folder of cases in the same format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from case_runner import find_cases, run_case

if TYPE_CHECKING:
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder: Path = metafunc.config.getoption("--cases-dir")
    found = find_cases(folder)
    if not found:
        message = f"no *.json below {folder}"
        raise pytest.UsageError(message)
    ids = [path.relative_to(folder).with_suffix("").as_posix() for path in found]
    metafunc.parametrize("path", found, ids=ids)


def test_case(path: Path) -> None:
    run_case(path)
