#!/usr/bin/env python3
"""Compile every GPU kernel for gfx90a, gfx942 and gfx950 and check the machine code; no AMD GPU or software is needed.

    python tests/kernels/hip/compile.py [--all] [--target gfx950] [--verbose]

Prints one line a source and variant, and every defect; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checks import E2M1, E4M3, KernelFacts, check_all
from toolchain import USUAL, VARIANTS, CompileError


def table(kernels: list[KernelFacts]) -> list[str]:
    """Return one line a source and variant."""
    lines = ["variant          source      kernels registers shared private instructions x4-loads e4m3 e2m1"]
    for key in sorted({(kernel.variant, kernel.source) for kernel in kernels}):
        group = [kernel for kernel in kernels if (kernel.variant, kernel.source) == key]
        most = {
            name: max(kernel.metadata[name] for kernel in group)
            for name in ("vgpr_count", "group_segment_fixed_size", "private_segment_fixed_size")
        }
        total = sum(kernel.counts.total() for kernel in group)
        wide = sum(kernel.loaded("dwordx4") for kernel in group)
        converted = [sum(kernel.counts[name] for kernel in group) for name in (E4M3, E2M1)]
        lines.append(
            f"{key[0]!s:16} {key[1]:11} {len(group):7} {most['vgpr_count']:9} {most['group_segment_fixed_size']:6} "
            f"{most['private_segment_fixed_size']:7} {total:12} {wide:8} {converted[0]:4} {converted[1]:4}"
        )
    return lines


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = sorted({variant.target for variant in VARIANTS})
    parser.add_argument("--target", action="append", choices=targets, help="only this target (may be repeated)")
    parser.add_argument("--all", action="store_true", help="every source in every variant, not only what differs")
    parser.add_argument("--verbose", action="store_true", help="one line a kernel")
    options = parser.parse_args()
    chosen = VARIANTS if options.all else USUAL
    variants = tuple(v for v in chosen if not options.target or v.target in options.target)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            kernels, wrong = check_all(variants, Path(folder), everything=options.all)
    except CompileError as error:
        sys.stderr.write(f"hip compile: {error}\n")
        return 1
    lines = table(kernels)
    if options.verbose:
        lines += [f"{k.variant} {k.name}: {k.metadata['vgpr_count']}, {k.counts.total()}" for k in kernels]
    lines.append(f"{len(kernels)} kernels, {len(wrong)} defects, {time.monotonic() - start:.0f} s")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stderr.write("".join(f"hip compile: {line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
