"""Check that the compiled library holds CUDA kernels (a CI step where nvcc is found, after the build)."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "quant_kernels"
SECTION = b".nv_fatbin\0"


def main() -> int:
    """Print what was found; return 1 when there is no library or one without device code."""
    libraries = sorted(PACKAGE.glob("_C*.so"))
    without = [library.name for library in libraries if SECTION not in library.read_bytes()]
    if not libraries:
        sys.stderr.write(f"{PACKAGE}: no compiled library\n")
    for name in without:
        sys.stderr.write(f"{name}: built without CUDA kernels although nvcc is on the path\n")
    sys.stdout.write(f"CUDA kernels in: {[each.name for each in libraries if each.name not in without]}\n")
    return int(not libraries or bool(without))


if __name__ == "__main__":
    sys.exit(main())
