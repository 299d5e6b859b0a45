"""The registries are filled at first use, by whichever thread comes first; the others must not see them half full."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import quant_spec

sys.setswitchinterval(1e-6)
start = threading.Barrier(8)


def ask(_):
    start.wait()
    {statement}


with ThreadPoolExecutor(8) as pool:
    list(pool.map(ask, range(8)))
"""


@pytest.mark.parametrize(
    "statement",
    ['quant_spec.get_format("ptpc_fp8")', 'quant_spec.QuantizationConfig.from_dict({"quant_method": "fp8"})'],
)
def test_first_look_up_from_many_threads(statement: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
