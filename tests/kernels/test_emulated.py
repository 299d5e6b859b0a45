"""The GPU kernels run on the host, under sanitizers, against the host kernels. Needs g++ alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = ("device", "rows", "groups", "blocks", "coded_groups", "coded_rows", "nvfp4", "dense", "matrix_amax")
FLAGS = ("-std=c++20", "-DQK_EMULATE", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-w", "-pthread")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(root: Path, folder: Path, *flags: str, without_barrier: bool = False) -> Path:
    """Compile the emulation with the project's kernels; without the barrier of rows.cu if asked."""
    csrc, here = root / "quant_kernels" / "csrc", root / "tests" / "kernels" / "emulate"
    sources = [csrc / f"{name}.cu" for name in KERNELS]
    if without_barrier:
        text = (csrc / "rows.cu").read_text(encoding="utf-8")
        assert "barrier();" in text
        changed = folder / "rows.cu"
        changed.write_text(text.replace("barrier();", ""), encoding="utf-8")
        sources[1] = changed
    host = [here / "main.cpp", csrc / "cpu" / "kernels_baseline.cpp", csrc / "cpu" / "dispatch.cpp"]
    program = folder / "emulate"
    command = ["g++", *FLAGS, *flags, f"-I{csrc}", f"-I{here}", *map(str, host), "-x", "c++", *map(str, sources)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=300)


def build_part(root: Path, folder: Path, name: str) -> Path:
    """Compile a program of the emulation that includes one kernel's source and needs no other."""
    csrc, here = root / "quant_kernels" / "csrc", root / "tests" / "kernels" / "emulate"
    program = folder / name
    command = ["g++", *FLAGS, "-O2", f"-I{csrc}", f"-I{here}", str(here / f"{name}.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def check_passed(done: subprocess.CompletedProcess[str], least: int) -> None:
    closing = re.search(r"(\d+) cases, (\d+) failed", done.stdout)
    assert closing is not None, done.stdout + done.stderr
    assert int(closing[2]) == 0, done.stdout
    assert int(closing[1]) >= least
    assert done.returncode == 0, done.stderr


def test_kernels_equal_the_host_kernels(root: Path, tmp_path: Path) -> None:
    check_passed(run(build(root, tmp_path, "-O1"), "--quick"), 500)


def test_thresholds_of_codes_equal_their_values_conversion(root: Path, tmp_path: Path) -> None:
    check_passed(run(build_part(root, tmp_path, "group_steps")), 500_000)


def test_tables_of_codes_equal_their_values_conversion(root: Path, tmp_path: Path) -> None:
    check_passed(run(build_part(root, tmp_path, "row_tables")), 500_000)


@pytest.mark.slow
def test_no_access_outside_and_nothing_undefined(root: Path, tmp_path: Path) -> None:
    program = build(root, tmp_path, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    check_passed(run(program, "--quick"), 500)


@pytest.mark.slow
def test_no_race_and_a_missing_barrier_is_seen(root: Path, tmp_path: Path) -> None:
    flags = ("-O1", "-g", "-fsanitize=thread", "-DQK_OS_THREADS")
    program = build(root, tmp_path, *flags)
    for case in (
        "bf16 -> ptpc [1, 1, 4096] pad 0 shift 0 variant 0",
        "bf16 -> blocks [2, 32, 256] pad 0 shift 0 variant 0",
    ):
        check_passed(run(program, case), 1)
    broken = run(
        build(root, tmp_path, *flags, without_barrier=True), "bf16 -> ptpc [1, 1, 4096] pad 0 shift 0 variant 0"
    )
    assert "data race" in broken.stderr
    assert broken.returncode != 0
