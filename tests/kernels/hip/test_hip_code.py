"""The checks of compile.py see what they are there for, and the kernels pass them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from checks import E2M1, E4M3, KernelFacts, builtin_defects, defects, facts
from toolchain import CSRC, CompileError, Variant, clang, device_texts

if TYPE_CHECKING:
    from pathlib import Path

GFX942, GFX950 = Variant("gfx942", software=False), Variant("gfx950", software=False)
RESOURCES = {
    "vgpr_spill_count": 0,
    "sgpr_spill_count": 0,
    "vgpr_count": 64,
    "group_segment_fixed_size": 32,
    "private_segment_fixed_size": 0,
    "wavefront_size": 64,
}
GOOD = KernelFacts(GFX950, "rows", "rows_kernel PlainLoader", Counter({"global_load_dwordx4": 4, E4M3: 8}), RESOURCES)


@pytest.mark.parametrize("variant", [GFX942, GFX950], ids=str)
def test_machine_code_is_as_wanted(variant: Variant) -> None:
    kernels = facts(device_texts((variant,)))
    assert {kernel.source for kernel in kernels} >= {"rows", "groups", "blocks", "dense"}
    assert [f"{kernel.name}: {defect}" for kernel in kernels for defect in defects(kernel)] == []


def test_a_good_kernel_has_no_defect() -> None:
    assert defects(GOOD) == []
    assert defects(replace(GOOD, variant=GFX942)) == []


@pytest.mark.parametrize(
    ("resource", "value", "message"),
    [
        ("vgpr_spill_count", 1, "vgpr_spill_count is 1, at most 0 is allowed"),
        ("private_segment_fixed_size", 16, "private_segment_fixed_size is 16, at most 0 is allowed"),
        ("vgpr_count", 300, "vgpr_count is 300, at most 256 is allowed"),
        ("group_segment_fixed_size", 65536, "group_segment_fixed_size is 65536, at most 32768 is allowed"),
        ("wavefront_size", 32, "waves of 32 lanes, not 64"),
    ],
)
def test_each_resource_is_bounded(resource: str, value: int, message: str) -> None:
    assert defects(replace(GOOD, metadata={**RESOURCES, resource: value})) == [message]


def test_instructions_are_wanted_by_target_and_variant() -> None:
    without = replace(GOOD, counts=Counter({"global_load_dwordx4": 4}))
    assert defects(without) == [f"conversion instructions [], expected ['{E4M3}']"]
    assert defects(replace(without, variant=Variant("gfx950", software=True))) == []
    assert defects(replace(GOOD, variant=Variant("gfx950", software=True))) != []
    assert defects(replace(GOOD, counts=Counter({"global_load_dword": 4, E4M3: 8}))) == ["no load of 16 bytes"]
    mxfp4 = replace(without, name="groups_kernel PlainLoader TargetE2E")
    assert defects(mxfp4) == [f"conversion instructions [], expected ['{E2M1}']"]
    assert defects(replace(mxfp4, variant=GFX942)) == []


def test_builtins_are_refused_where_the_instruction_is_missing(tmp_path: Path) -> None:
    assert builtin_defects(tmp_path) == []


def test_hardware_conversions_cannot_be_compiled_for_another_target(tmp_path: Path) -> None:
    """The project's own gfx950 code, forced on gfx942, is an error and not a silent wrong choice."""
    source = tmp_path / "forced.cu"
    source.write_text(
        '#define QK_GFX950 1\n#include "packed.h"\nusing namespace qk;\n'
        "QK_GLOBAL void probe(const Pack<kBf16, 8>* x, uint32_t* out) { *out = pack_e2m1(*x, 127u); }\n",
        encoding="utf-8",
    )
    flags = (
        "-x",
        "hip",
        "--offload-device-only",
        "-nogpulib",
        "-nogpuinc",
        "-std=c++20",
        "-DQK_HIP_BARE",
        "-DQK_SOFTWARE",
    )
    arguments = (*flags, f"-I{CSRC}", "-S", "-o", str(tmp_path / "out.s"), str(source))
    clang("--offload-arch=gfx950", *arguments)
    with pytest.raises(CompileError, match="needs target feature"):
        clang("--offload-arch=gfx942", *arguments)
