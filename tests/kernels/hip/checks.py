"""What the machine code of the kernels must be: wide loads, hardware conversions, no spills, bounded resources."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass

from toolchain import HERE, CompileError, Variant, clang, device_texts

sys.path.insert(0, str(HERE.parent / "isa"))
from typing import TYPE_CHECKING

from amdgcn import Assembly

if TYPE_CHECKING:
    from pathlib import Path

WAVE = 64
# 512 registers a lane are shared by the waves of a SIMD: two waves fit, that is, two blocks of 256 threads on 4 SIMDs.
MAX_REGISTERS = 256
# Scalar registers are spilled to lanes of a vector register, not to memory.
MAX_SCALARS_MOVED = 16
MAX_SHARED = 32 * 1024
# Kernels for unaligned and strided weights index small arrays while running.
MAX_PRIVATE_CAREFUL = 64
E4M3, E2M1 = "v_cvt_pk_fp8_f32", "v_cvt_scalef32_pk_fp4_f32"
# Refused by the compiler unless the target has the instruction.
BUILTINS = {
    "e4m3": ("r[0] = __builtin_amdgcn_cvt_pk_fp8_f32(x[0], x[1], 0, false);", ("gfx942", "gfx950"), ("gfx90a",)),
    "e2m1": (
        "r[0] = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(0u, x[0], x[1], 1.0f, 0);",
        ("gfx950",),
        ("gfx90a", "gfx942"),
    ),
}


@dataclass(frozen=True)
class KernelFacts:
    """One compiled kernel."""

    variant: Variant
    source: str
    name: str
    counts: Counter[str]
    metadata: dict[str, int]

    @property
    def careful(self) -> bool:
        """Whether it is made for weights that are unaligned or strided."""
        return "PlainLoader" not in self.name and "EncodedLoader" not in self.name

    def loaded(self, width: str) -> int:
        """Return the number of loads of a width, for example `dwordx4`."""
        return self.counts[f"global_load_{width}"]


def facts(texts: dict[tuple[Variant, str], Path]) -> list[KernelFacts]:
    """Return what is known of every kernel in assembly texts."""
    found = []
    for (variant, source), path in sorted(texts.items()):
        assembly_text = path.read_text(encoding="utf-8")
        if ".amdhsa_kernel" not in assembly_text:
            continue
        assembly = Assembly(assembly_text)
        for name in assembly.names:
            words = re.findall(r"^\t([a-z]\w+)", assembly.code(name), re.MULTILINE)
            counts = Counter(re.sub(r"_(e32|e64|sdwa|dpp)$", "", word) for word in words)
            found.append(KernelFacts(variant, source, name, counts, assembly.metadata(name)))
    return found


def defects(kernel: KernelFacts) -> list[str]:
    """Return what is wrong with a kernel's machine code."""
    data = kernel.metadata
    wrong = [
        f"{name} is {data[name]}, at most {greatest} is allowed"
        for name, greatest in (
            ("vgpr_spill_count", 0),
            ("sgpr_spill_count", MAX_SCALARS_MOVED),
            ("vgpr_count", MAX_REGISTERS),
            ("group_segment_fixed_size", MAX_SHARED),
            ("private_segment_fixed_size", MAX_PRIVATE_CAREFUL if kernel.careful else 0),
        )
        if data[name] > greatest
    ]
    if data["wavefront_size"] != WAVE:
        wrong.append(f"waves of {data['wavefront_size']} lanes, not {WAVE}")
    return wrong + _loads(kernel) + _conversions(kernel)


def _loads(kernel: KernelFacts) -> list[str]:
    if "PlainLoader" in kernel.name and not kernel.loaded("dwordx4"):
        return ["no load of 16 bytes"]
    if "EncodedLoader" in kernel.name and not kernel.loaded("dwordx4") + kernel.loaded("dwordx2") + kernel.loaded(
        "dword"
    ):
        return ["no load of whole words"]
    return []


def _conversions(kernel: KernelFacts) -> list[str]:
    """Hardware variants use the target's conversions where it has the format: e4m3 is FNUZ on gfx942, OCP on gfx950."""
    found = {name for name in (E4M3, E2M1) if kernel.counts[name]}
    wanted: set[str] = set()
    if not kernel.variant.software:
        coded = "coded_" in kernel.name
        rows = "rows_kernel" in kernel.name and not coded
        mxfp4, mxfp8 = ("TargetE2E" in kernel.name, "TargetE3E" in kernel.name)
        if kernel.variant.target == "gfx942" and rows:
            wanted.add(E4M3)
        if kernel.variant.target == "gfx950":
            makers = ("coded_rows_kernel", "blocks_kernel", "nvfp4_kernel", "linear_x_kernel")
            if rows or mxfp8 or any(name in kernel.name for name in makers):
                wanted.add(E4M3)
            if mxfp4 or "coded_groups_kernel" in kernel.name:
                wanted.add(E2M1)
    if found == wanted:
        return []
    return [f"conversion instructions {sorted(found)}, expected {sorted(wanted)}"]


def builtin_defects(folder: Path) -> list[str]:
    """Compile each conversion builtin for targets that have it and for those that do not; return what went wrong."""
    wrong = []
    for name, (statement, having, lacking) in BUILTINS.items():
        source = folder / f"{name}.cu"
        source.write_text(
            f'extern "C" __attribute__((global)) void probe(const float* x, unsigned* r) {{ {statement} }}\n',
            encoding="utf-8",
        )
        for target in (*having, *lacking):
            error = _compile_error(source, target)
            if target in having and error:
                wrong.append(f"{name} on {target}: {error}")
            if target in lacking and "needs target feature" not in error:
                wrong.append(f"{name} on {target}: not refused for the missing instruction, but: {error or 'compiled'}")
    return wrong


def _compile_error(source: Path, target: str) -> str:
    flags = ("-x", "hip", "--offload-device-only", "-nogpulib", "-nogpuinc", "-O3", "-S", "-o", "/dev/null")
    try:
        clang(*flags, f"--offload-arch={target}", str(source))
    except CompileError as error:
        return str(error)
    return ""


def check_all(variants: tuple[Variant, ...], folder: Path, *, everything: bool) -> tuple[list[KernelFacts], list[str]]:
    """Compile everything; return the kernels, and all defects as lines of text."""
    kernels = facts(device_texts(variants, everything=everything))
    lines = [f"{k.variant} {k.source} {k.name}: {defect}" for k in kernels for defect in defects(k)]
    return kernels, lines + builtin_defects(folder)
