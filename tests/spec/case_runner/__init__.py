"""Runs resolution cases (`tests/data/cases/*.json`) through the public API."""

from case_runner.loading import Case, find_cases
from case_runner.running import run_case

__all__ = ["Case", "find_cases", "run_case"]
