"""Build of the compiled library: host kernels always, GPU kernels where a CUDA or ROCm compiler is found.

The library uses torch's stable ABI (target 2.10) and Python's limited API (3.10): one wheel serves several versions
of both. Environment:

    QUANT_KERNELS_GPU=0             leave the GPU kernels out
    QUANT_KERNELS_CUDA_ARCHS=90,100 compute capabilities to build for (default: 90, and intermediate code for later)
    QUANT_KERNELS_NATIVE=0          build no library at all: conversions run in plain torch
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.resolve()
CSRC = Path("quant_kernels") / "csrc"
HOST_SOURCES = [
    CSRC / "ops.cpp",
    CSRC / "linear_ops.cpp",
    CSRC / "cpu" / "dispatch.cpp",
    CSRC / "cpu" / "kernels_baseline.cpp",
    CSRC / "cpu" / "kernels_avx2.cpp",
    CSRC / "cpu" / "kernels_avx512.cpp",
]
# The slowest to compile first.
GPU_SOURCES = [
    CSRC / f"{name}.cu"
    for name in (
        "rows",
        "groups",
        "blocks",
        "coded_groups",
        "coded_rows",
        "nvfp4",
        "matrix_amax",
        "dense",
        "device",
        "linear",
    )
]
MACROS = [
    ("TORCH_STABLE_ONLY", None),
    ("TORCH_TARGET_VERSION", "0x020a000000000000"),
]
# Loops over conversions vectorize only if comparisons may not trap and errno need not be set. Never -ffast-math: it
# replaces the division by a product with the reciprocal. No contraction: a fused multiply-add rounds differently.
HOST_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # torch's own headers
]
NVCC_FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden"]
# What torch hands to hipcc. Without the last one clang fuses products and sums, which rounds differently.
HIP_FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off"]


def cuda_compiler() -> str | None:
    """Return nvcc, or None if it is not there or not wanted."""
    if os.environ.get("QUANT_KERNELS_GPU", "1") == "0" or torch.version.hip or not GPU_SOURCES:
        return None
    home = cpp_extension.CUDA_HOME
    candidates = [str(Path(home) / "bin" / "nvcc")] if home else []
    return next((path for path in candidates if Path(path).is_file()), None) or shutil.which("nvcc")


class BuildLibrary(cpp_extension.BuildExtension):
    """Torch's build, with CUDA kernels compiled beside it: their objects need nothing of torch."""

    def build_extensions(self) -> None:
        """Compile the CUDA sources, then the library."""
        nvcc = cuda_compiler()
        if nvcc is not None:
            for extension in self.extensions:
                extension.extra_objects += self.cuda_objects(nvcc)
                extension.library_dirs += [str(self.cuda_libraries(nvcc))]
                extension.libraries += ["cudart_static", "rt", "pthread", "dl"]
        super().build_extensions()

    def cuda_libraries(self, nvcc: str) -> Path:
        """Return the folder of the static CUDA runtime."""
        # nvcc may be a script that calls another: it says itself where its toolkit is.
        said = subprocess.run(  # noqa: S603
            [nvcc, "--dryrun", "-x", "cu", os.devnull], check=False, capture_output=True, text=True
        ).stderr
        tops = [line.partition("TOP=")[2] for line in said.splitlines() if "TOP=" in line]
        home = Path(tops[0] if tops else nvcc).resolve() if tops else Path(nvcc).resolve().parent.parent
        folders = [home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib"]
        return next((path for path in folders if (path / "libcudart_static.a").is_file()), folders[0])

    def cuda_objects(self, nvcc: str) -> list[str]:
        """Compile the CUDA sources that changed; return all objects."""
        # Not in build_temp, which an editable install throws away: the wheel built after it takes the same objects.
        folder = ROOT / "build" / "cuda"
        folder.mkdir(parents=True, exist_ok=True)
        common = max(path.stat().st_mtime for path in [ROOT / "setup.py", *(ROOT / CSRC).rglob("*.h")])
        archs = os.environ.get("QUANT_KERNELS_CUDA_ARCHS", "90").replace(";", ",").split(",")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        # The intermediate code of the last one runs on every later GPU, translated when it is loaded.
        codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        commands, objects = [], []
        for source in GPU_SOURCES:
            target = folder / f"{source.stem}_{'_'.join(archs)}.o"
            objects.append(str(target))
            newest = max(common, (ROOT / source).stat().st_mtime)
            if not target.exists() or target.stat().st_mtime < newest:
                commands.append([nvcc, *NVCC_FLAGS, *codes, "-c", str(ROOT / source), "-o", str(target)])
        workers = min(len(commands), int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) or 1
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))  # noqa: S603
        return objects


def extension() -> Extension:
    """Return the library."""
    options = {
        "define_macros": MACROS,
        "extra_compile_args": {"cxx": HOST_FLAGS, "nvcc": HIP_FLAGS},
        "extra_link_args": ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-Wl,-s"],
        "py_limited_api": True,
    }
    sources = [*map(str, HOST_SOURCES)]
    if torch.version.hip and GPU_SOURCES:
        return cpp_extension.CUDAExtension("quant_kernels._C", [*sources, *map(str, GPU_SOURCES)], **options)
    if cuda_compiler() is None:
        sources.append(str(CSRC / "no_device.cpp"))
    return cpp_extension.CppExtension("quant_kernels._C", sources, **options)


wanted = os.environ.get("QUANT_KERNELS_NATIVE", "1") != "0"
setup(
    ext_modules=[extension()] if wanted else [],
    cmdclass={"build_ext": BuildLibrary.with_options(use_ninja=shutil.which("ninja") is not None)} if wanted else {},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
