"""Finding and reading case files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One case file."""

    path: Path
    data: dict[str, Any]

    @property
    def expect(self) -> dict[str, Any]:
        return self.data.get("expect") or {}

    @property
    def error(self) -> dict[str, Any] | None:
        return self.data.get("expect_error")

    @property
    def is_numeric(self) -> bool:
        return "op" in self.data


def find_cases(folder: Path) -> list[Path]:
    """Every `*.json` in `folder` and below."""
    return sorted(folder.rglob("*.json"))


def read_case(path: Path) -> Case:
    return Case(path, json.loads(path.read_text("utf-8")))
