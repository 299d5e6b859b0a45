"""Fixtures and options that every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--cases-dir`, for the case corpus of `tests/spec/test_cases.py`."""
    parser.addoption(
        "--cases-dir",
        type=Path,
        default=ROOT / "tests" / "data" / "cases",
        metavar="DIR",
        help="folder of resolution cases to run instead of tests/data/cases",
    )


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT
