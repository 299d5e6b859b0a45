"""What the interpreter refuses or finds wrong; every message names the line of the assembly text."""

from __future__ import annotations


class IsaError(Exception):
    """Base of all errors of the interpreter."""


class UnsupportedError(IsaError):
    """The text uses an instruction, operand, modifier or kernel setting that the interpreter does not model."""


class MemoryFaultError(IsaError):
    """An access outside every mapped region, across the end of one, or a write to a read-only one."""


class RaceError(IsaError):
    """Two waves touch the same bytes of shared memory, one of them writing, with no barrier between."""


class HangError(IsaError):
    """A wave executed more instructions than a test kernel can need."""
