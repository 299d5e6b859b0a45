"""Makes the interpreter and the HIP toolchain importable: test folders are no packages."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "hip"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
