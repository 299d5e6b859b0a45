"""Compiles the kernels for AMD GPUs and their launchers for the host with the clang of the `ziglang` package.

No HIP installation is needed: `include/hip/hip_runtime.h` stands in for its header. Results are kept in `build/hip`,
under a name that changes with everything they depend on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "quant_kernels" / "csrc"
CACHE = ROOT / "build" / "hip"
CLANG = (sys.executable, "-m", "ziglang", "clang")
# -ffp-contract=off: a fused multiply-add rounds differently. -fuse-cuid=none: the same text every time.
COMMON = (
    "-fuse-cuid=none",
    "-x",
    "hip",
    "-nogpulib",
    "-nogpuinc",
    "-fdeclspec",
    "-std=c++20",
    "-ffp-contract=off",
    "-Werror",
    f"-I{HERE / 'include'}",
    f"-I{CSRC}",
)
DEVICE = ("--offload-device-only", "-O3", "-S")
# Every object has a marker of the same name, because -fuse-cuid=none leaves it without a hash.
DUPLICATES = "-Wl,--allow-multiple-definition"
HOST = ("--offload-host-only", "--offload-arch=gfx942", "-O1", "-fPIC", "-c")


class CompileError(Exception):
    """The compiler refused a source; the text is its own."""


@dataclass(frozen=True, order=True)
class Variant:
    """One way to compile the kernels: a target, and conversions in software or by the target's instructions."""

    target: str
    software: bool

    def __str__(self) -> str:
        """Return the name in tables and paths."""
        return f"{self.target}-{'software' if self.software else 'hardware'}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of this variant."""
        return (f"--offload-arch={self.target}", *(("-DQK_SOFTWARE",) if self.software else ()))


# gfx90a has no conversion instruction for small floats. gfx942's are for FNUZ codes alone, so that its OCP codes are
# made in software in either variant.
VARIANTS = (
    Variant("gfx90a", software=True),
    Variant("gfx942", software=True),
    Variant("gfx942", software=False),
    Variant("gfx950", software=True),
    Variant("gfx950", software=False),
)
# What every change is checked with: the hardware variants in full, and of the software ones what is quick to compile
# (software conversions are the same source on every target, and rows.cu is compiled for gfx90a by rocm_build.py).
USUAL = tuple(variant for variant in VARIANTS if variant != Variant("gfx942", software=True))
SLOW = frozenset({"rows"})


def sources() -> list[Path]:
    """Return the sources of the GPU kernels."""
    found = sorted(CSRC.glob("*.cu"))
    if not found:
        raise CompileError(f"{CSRC}: no .cu file")
    return found


def clang(*arguments: str) -> None:
    """Run the compiler.

    Raises:
        CompileError: it failed.
    """
    done = subprocess.run([*CLANG, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"clang exited with {done.returncode}")


def _headers_digest() -> str:
    digest = hashlib.sha256(importlib.metadata.version("ziglang").encode())
    for path in sorted([*CSRC.glob("*.h"), *(HERE / "include").rglob("*.h"), HERE / "runtime.cpp"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _kept(source: Path, flags: tuple[str, ...], label: str, suffix: str, headers: str) -> Path:
    """Return the result of compiling a source, compiling it if it is not there yet."""
    key = hashlib.sha256("\0".join([headers, source.name, *flags]).encode() + source.read_bytes()).hexdigest()[:16]
    path = CACHE / f"{source.stem}-{label}-{key}{suffix}"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        clang(*COMMON, *flags, "-o", str(partial), str(source))
        for old in CACHE.glob(f"{source.stem}-{label}-*{suffix}"):
            old.unlink()
        partial.replace(path)
    return path


def device_text(source: Path, variant: Variant, *extra: str) -> Path:
    """Return the assembly text of one source.

    Args:
        source: a `.cu` file.
        variant: target and kind of conversions.
        extra: further flags, for example macros.
    """
    label = "-".join([str(variant), *(flag.strip("-").replace("=", "_") for flag in extra)])
    return _kept(source, (*DEVICE, *variant.flags, *extra), label, ".s", _headers_digest())


def compiled_sources(variant: Variant, *, everything: bool) -> list[Path]:
    """Return the sources that are compiled in a variant: all, or those of the usual checks."""
    partial = variant.software and not everything
    return [source for source in sources() if not (partial and source.stem in SLOW)]


def device_texts(variants: tuple[Variant, ...], *, everything: bool = False) -> dict[tuple[Variant, str], Path]:
    """Return the assembly text of the sources in each variant, compiled side by side, the longest first."""
    jobs = [(variant, source) for variant in variants for source in compiled_sources(variant, everything=everything)]
    jobs.sort(key=lambda job: (job[1].stem not in SLOW, -job[1].stat().st_size))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        paths = list(pool.map(lambda job: device_text(job[1], job[0]), jobs))
    return {(variant, source.stem): path for (variant, source), path in zip(jobs, paths, strict=True)}


def host_library() -> Path:
    """Return a shared library of the launchers and a runtime that hands launches to `qk_test_on_launch`'s function."""
    headers = _headers_digest()
    files = [*sources(), HERE / "runtime.cpp"]
    objects = [_kept(source, HOST, "host", ".o", headers) for source in files]
    path = objects[-1].with_suffix(".so")
    newest = max(item.stat().st_mtime_ns for item in objects)
    if not path.exists() or path.stat().st_mtime_ns < newest:
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        done = subprocess.run(
            ["g++", "-shared", DUPLICATES, "-o", str(partial), *map(str, objects)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CompileError(done.stderr)
        partial.replace(path)
    return path
