#!/usr/bin/env python3
"""Build the library as a user of ROCm does, without ROCm: torch's own extension path with Debian's hipcc.

    python tests/kernels/hip/rocm_build.py [--keep FOLDER]

A CPU build of torch is told that it is one for ROCm; `setup.py` then takes its ROCm branch: hipify, hipcc for the
kernels, the host compiler for the operators, link. The result is loaded in a fresh process with no GPU: it must convert
on the CPU, say that it holds kernels, and carry code for the target asked for. Debian's hipcc knows gfx90a alone of our
targets. It is installed with apt-get when missing and the user is root.

The exit code is 0 if all of this holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGET = "gfx90a"
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "quant_spec", "quant_kernels", "schemas")
# torch links a ROCm extension with these; nothing of ours needs a symbol of them, so --as-needed drops empty ones.
STANDINS = ("c10_hip", "torch_hip")
BUILD = """
import runpy, sys
import torch
torch.version.hip = "5.2.0"
torch.cuda._is_compiled = lambda: True
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""
USE = """
import torch
import quant_kernels as qk
from quant_kernels.library import library_path, load_library, reference_backend
assert load_library(), "the library cannot be loaded"
devices = torch.ops.quant_kernels._native_devices()
assert devices == 3, f"devices {devices}: no GPU kernels in it"
weight = torch.randn(64, 256).to(torch.bfloat16)
for name in ("ptpc_fp8", "mxfp4"):
    found = qk.quantize(weight, name)
    with reference_backend():
        wanted = qk.quantize(weight, name)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8)), name
assert not torch.cuda.is_available()
print(library_path())
"""


class RocmBuildError(Exception):
    """A step failed; the text says which and how."""


def find_hipcc() -> str:
    """Return the path of hipcc, installing Debian's if there is none.

    Raises:
        RocmBuildError: there is none and it cannot be installed.
    """
    found = shutil.which("hipcc")
    if found:
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise RocmBuildError("hipcc is not installed; `apt-get install --no-install-recommends hipcc` brings it")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "hipcc"]
    if subprocess.run(install, env=quiet, check=False, capture_output=True).returncode:
        _run(["apt-get", "update", "-qq"], env=quiet)
        _run(install, env=quiet)
    return shutil.which("hipcc") or "hipcc"


def _run(command: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RocmBuildError(f"{' '.join(command[:3])} ... failed with {done.returncode}:\n{tail}")
    return done.stdout


def copy_sources(folder: Path) -> None:
    """Copy what a build needs: hipify writes its results beside the sources."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.hip", "*_hip.*")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / name)


def quick_tools(folder: Path, hipcc: str) -> tuple[Path, Path]:
    """Make a ROCm home and a host compiler that do not optimise: code is checked elsewhere, here it has to be built.

    Torch puts `-O3` of setup.py behind every flag that the environment can give: only a program in between comes last.

    Returns:
        The home (a folder with `bin/hipcc`, `include` and `lib`), and the host compiler.
    """
    home = Path(hipcc).resolve().parents[1] if "rocm" in hipcc else Path("/usr")
    bin_folder = folder / "rocm" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("include", "lib"):
        (folder / "rocm" / name).symlink_to(home / name)
    for name, program in (("hipcc", hipcc), ("c++", "c++")):
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {shutil.which(program)} "$@" -O0\n', encoding="utf-8")
        script.chmod(0o755)
    return folder / "rocm", bin_folder / "c++"


def build(folder: Path) -> Path:
    """Build the library in a copy of the sources and return its path.

    Raises:
        RocmBuildError: the build failed, or made no library.
    """
    hipcc = find_hipcc()
    standins = folder / "standins"
    standins.mkdir()
    for name in STANDINS:
        _run(["g++", "-shared", "-o", str(standins / f"lib{name}.so"), "-x", "c++", os.devnull])
    # Beside the sources, not among them: hipify would go through all of the home's headers.
    tools = folder.with_name(f"{folder.name}-tools")
    home, compiler = quick_tools(tools, hipcc)
    environment = {
        **os.environ,
        "ROCM_HOME": str(home),
        "CXX": str(compiler),
        "HIP_PLATFORM": "amd",  # hipcc would take nvcc's side where nvcc is installed
        "PYTORCH_ROCM_ARCH": TARGET,
        "LIBRARY_PATH": str(standins),
    }
    _run([sys.executable, "-c", BUILD], env=environment, cwd=folder)
    commands = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("build.ninja"))
    if "-ffp-contract=off" not in commands:
        raise RocmBuildError("hipcc was called without -ffp-contract=off: fused products and sums round differently")
    found = sorted((folder / "quant_kernels").glob("_C*.so"))
    if len(found) != 1:
        raise RocmBuildError(f"the build made {len(found)} libraries, not one")
    return found[0]


def check(library: Path, folder: Path) -> None:
    """Check what was built.

    Raises:
        RocmBuildError: it holds no code of the target, is tied to a library it must not need, or cannot be used.
    """
    if f"amdgcn-amd-amdhsa--{TARGET}".encode() not in library.read_bytes():
        raise RocmBuildError(f"{library.name} holds no code for {TARGET}")
    needed = [
        line.split("[")[1].rstrip("]")
        for line in _run(["readelf", "-d", str(library)]).splitlines()
        if "NEEDED" in line
    ]
    wrong = [name for name in needed if any(standin in name for standin in STANDINS)]
    if wrong:
        raise RocmBuildError(f"{library.name} needs {', '.join(wrong)}: it uses more of torch than the stable ABI")
    if not any("amdhip64" in name for name in needed):
        raise RocmBuildError(f"{library.name} does not need HIP's runtime; it needs {', '.join(needed)}")
    _run([sys.executable, "-c", USE], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="build in this new folder and leave it")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary) / "source"
            folder.mkdir(parents=True)
            copy_sources(folder)
            library = build(folder)
            check(library, folder)
            size = library.stat().st_size
    except RocmBuildError as error:
        sys.stderr.write(f"rocm build: {error}\n")
        return 1
    seconds = time.monotonic() - start
    sys.stdout.write(f"built for {TARGET}, loaded and used without a GPU: {size} bytes, {seconds:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
