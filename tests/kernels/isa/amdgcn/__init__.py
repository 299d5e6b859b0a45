"""An interpreter of AMD GPU assembly text for tests: no GPU and no AMD software needed."""

from __future__ import annotations

from amdgcn.assembly import Assembly, Instruction, Kernel
from amdgcn.errors import HangError, IsaError, MemoryFaultError, RaceError, UnsupportedError
from amdgcn.machine import Options, Program
from amdgcn.memory import Memory

__all__ = [
    "Assembly",
    "HangError",
    "Instruction",
    "IsaError",
    "Kernel",
    "Memory",
    "MemoryFaultError",
    "Options",
    "Program",
    "RaceError",
    "UnsupportedError",
]
