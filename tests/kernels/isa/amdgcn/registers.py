"""A wave: 64 lanes, their vector registers, the scalar registers they share, and how an operand is read and written.

Values of a vector operand are numpy arrays of 64 lanes or numpy scalars, in the type that a signature names:

    u i f   32 bits: unsigned, signed, float        U I F   64 bits
    H J h   16 bits: unsigned, signed, float        m       one bit a lane, in a pair of scalar registers
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction

LANES = 64
WORD = 0xFFFFFFFF
PAIR = 0xFFFFFFFFFFFFFFFF
VCC, M0, EXEC = 106, 124, 126
SCALARS = 128

Words = NDArray[np.uint32]
Mask = NDArray[np.bool_]

DTYPES: dict[str, type[np.generic]] = {
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "U": np.uint64,
    "I": np.int64,
    "F": np.float64,
    "H": np.uint16,
    "J": np.int16,
    "h": np.float16,
}
WIDE = frozenset("UIF")
HALF = frozenset("HJh")
FLOATS = frozenset("fFh")
_NAMED = {
    "vcc": VCC,
    "vcc_lo": VCC,
    "vcc_hi": VCC + 1,
    "m0": M0,
    "exec": EXEC,
    "exec_lo": EXEC,
    "exec_hi": EXEC + 1,
}
_REGISTER = re.compile(r"^([vs])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")


@lru_cache(maxsize=65536)
def lanes_of(bits: int) -> Mask:
    """Return 64 bits as a mask of lanes (read-only)."""
    mask = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little").astype(np.bool_)
    mask.flags.writeable = False
    return mask


def bits_of(mask: Mask) -> int:
    """Return a mask of lanes as 64 bits."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


class Wave:
    """State of one wave. Registers and private memory start with arbitrary bits: a kernel may not rely on them."""

    def __init__(self, vector_registers: int, private_bytes: int, poison: np.random.Generator) -> None:
        self.v: Words = poison.integers(1, WORD, (max(vector_registers, 1), LANES), np.uint32)
        self.s: list[int] = [int(value) for value in poison.integers(1, WORD, SCALARS)]
        self.scc = int(poison.integers(0, 2))
        self.private = poison.integers(1, 255, (LANES, private_bytes), np.uint8)
        self.pc = 0
        self.index = 0
        self.executed = 0
        self.waiting = False
        self.ended = False
        self.mask: Mask = lanes_of(PAIR)
        self.full = True
        self.set_exec(PAIR)

    def set_exec(self, bits: int) -> None:
        """Choose the active lanes."""
        self.s[EXEC] = bits & WORD
        self.s[EXEC + 1] = bits >> 32
        self.mask = lanes_of(bits)
        self.full = bits == PAIR

    def word(self, index: int) -> int:
        """Return a scalar register."""
        return self.s[index]

    def pair(self, index: int) -> int:
        """Return a pair of scalar registers as 64 bits."""
        return self.s[index] | (self.s[index + 1] << 32)

    def set_word(self, index: int, value: int) -> None:
        """Write a scalar register."""
        self.s[index] = value & WORD
        if index >= EXEC:
            self.set_exec(self.pair(EXEC))

    def set_pair(self, index: int, value: int) -> None:
        """Write a pair of scalar registers."""
        if index == EXEC:
            self.set_exec(value & PAIR)
        else:
            self.s[index] = value & WORD
            self.s[index + 1] = (value >> 32) & WORD

    def set_vector(self, index: int, value: Words, mask: Mask | None = None) -> None:
        """Write a vector register of the active lanes (or of those of `mask`)."""
        if mask is not None:
            np.copyto(self.v[index], value, where=mask)
        elif self.full:
            self.v[index] = value
        else:
            np.copyto(self.v[index], value, where=self.mask)


# ---- operands --------------------------------------------------------------------------------------------------------


def register(text: str) -> tuple[str, int, int] | None:
    """Return (file, first, count) of a register operand: file `v` or `s`; None for anything else."""
    if text in _NAMED:
        return "s", _NAMED[text], 1 if text.endswith(("_lo", "_hi")) or text == "m0" else 2
    match = _REGISTER.match(text)
    if match is None:
        return None
    first = int(match[2] or match[3])
    return match[1], first, int(match[4]) - first + 1 if match[4] else 1


def constant(text: str, kind: str) -> int | None:
    """Return the bits of a constant operand as an instruction of this type reads it; None if it is none.

    A float of 64 bits takes a literal of 32 bits as its high half; integers of 64 bits extend its sign.
    """
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        value = int(text, 0)
        if kind == "F" and not -16 <= value <= 64:
            return (value & WORD) << 32
        return value & (PAIR if kind in WIDE or kind == "m" else WORD)
    if re.fullmatch(r"-?\d+\.\d+(e[-+]?\d+)?", text):
        number = float(text)
        if kind in WIDE:
            return int(struct.unpack("<Q", struct.pack("<d", number))[0])
        if kind in HALF:
            return int(struct.unpack("<H", struct.pack("<e", number))[0])
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    return None


Reader = Callable[[Wave], np.ndarray]
ScalarReader = Callable[[Wave], int]


def scalar_reader(instruction: Instruction, text: str, *, wide: bool) -> ScalarReader:
    """Return what reads a scalar operand of 32 or 64 bits."""
    if text == "scc":
        return lambda wave: wave.scc
    found = register(text)
    if found is not None and found[0] == "s":
        index = found[1]
        return (lambda wave: wave.pair(index)) if wide else (lambda wave: wave.s[index])
    value = constant(text, "I" if wide else "i")
    if value is None:
        raise instruction.refuse(f"operand {text}")
    return lambda _: value


def scalar_writer(instruction: Instruction, text: str, *, wide: bool) -> Callable[[Wave, int], None]:
    """Return what writes a scalar destination."""
    found = register(text)
    if found is None or found[0] != "s":
        raise instruction.refuse(f"destination {text}")
    index = found[1]
    if wide:
        return lambda wave, value: wave.set_pair(index, value)
    return lambda wave, value: wave.set_word(index, value)


def bits_reader(instruction: Instruction, text: str, kind: str) -> Reader:
    """Return what reads the raw bits of a vector operand: uint32, or uint64 for 64-bit types."""
    wide = kind in WIDE
    found = register(text)
    if found is None:
        value = constant(text, kind)
        if value is None:
            raise instruction.refuse(f"operand {text}")
        fixed = (np.uint64 if wide else np.uint32)(value)
        return lambda _: fixed
    file, index, count = found
    if wide and count != 2:
        raise instruction.refuse(f"operand {text} of 64 bits")
    if file == "s":
        if wide:
            return lambda wave: np.uint64(wave.pair(index))
        return lambda wave: np.uint32(wave.s[index])
    if wide:
        return lambda wave: wave.v[index] | (wave.v[index + 1].astype(np.uint64) << np.uint64(32))
    return lambda wave: wave.v[index]


def mask_reader(instruction: Instruction, text: str) -> Reader:
    """Return what reads one bit a lane from a pair of scalar registers."""
    read = scalar_reader(instruction, text, wide=True)
    return lambda wave: lanes_of(read(wave))


def strip_signs(text: str) -> tuple[str, bool, bool]:
    """Return the operand without its sign modifiers, and whether it is negated and taken as a magnitude."""
    negated = text.startswith("-") and register(text[1:].strip("|")) is not None
    if negated:
        text = text[1:]
    magnitude = text.startswith("|") and text.endswith("|")
    return text.strip("|"), negated, magnitude
