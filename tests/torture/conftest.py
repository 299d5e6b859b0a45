"""Puts the long-running programs of this folder on the path of their short tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
