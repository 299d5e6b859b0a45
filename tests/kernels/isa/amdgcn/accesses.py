"""Instructions that read and write memory: scalar loads, global and shared loads, stores and atomic operations."""

# mypy: disable-error-code="no-any-return"
# (numpy types operators on arrays of any dtype as Any)

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from amdgcn.errors import MemoryFaultError
from amdgcn.memory import Memory, SharedMemory
from amdgcn.registers import Mask, Wave, register, scalar_reader

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction

Step = Callable[[Wave, Memory, SharedMemory], None]
U = np.uint32
_CACHE = frozenset({"sc0", "sc1", "nt", "glc", "slc", "offset", "offset0", "offset1"})
# name of a load's or store's value: (bytes, signed)
_PARTS = {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "short": (2, False)}
_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "byte": 1, "short": 2}
_SHARED = {"u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True)}
_SHARED_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
_ATOMICS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, value, bits: (old + value) & ((1 << bits) - 1),
    "umin": lambda old, value, _: min(old, value),
    "umax": lambda old, value, _: max(old, value),
    "smin": lambda old, value, bits: value if _signed(value, bits) < _signed(old, bits) else old,
    "smax": lambda old, value, bits: value if _signed(value, bits) > _signed(old, bits) else old,
    "or": lambda old, value, _: old | value,
    "and": lambda old, value, _: old & value,
    "swap": lambda _, value, __: value,
}


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _index(instruction: Instruction, text: str) -> int:
    found = register(text)
    if found is None or found[0] != "v":
        raise instruction.refuse(f"operand {text}")
    return found[1]


def _offset(instruction: Instruction, name: str = "offset") -> int:
    return int(instruction.modifiers.get(name, "0"), 0)


def _write_bytes(wave: Wave, index: int, values: NDArray[np.uint8], active: Mask) -> None:
    """Put the bytes of each active lane into consecutive registers."""
    words = np.ascontiguousarray(values).view(np.uint32)
    for part in range(words.shape[1]):
        wave.v[index + part][active] = words[:, part]


def _read_bytes(wave: Wave, index: int, size: int, active: Mask) -> NDArray[np.uint8]:
    words = wave.v[index : index + (size + 3) // 4][:, active].T
    return np.ascontiguousarray(words).view(np.uint8)[:, :size]


def _extended(values: NDArray[np.uint8], *, signed: bool) -> NDArray[np.uint8]:
    """Return one or two bytes a lane as a word."""
    kind = {1: np.int8 if signed else np.uint8, 2: np.int16 if signed else np.uint16}[values.shape[1]]
    return np.ascontiguousarray(values).view(kind).astype(np.int32).view(np.uint8)


Addresses = Callable[[Wave], NDArray[np.uint64]]


def _global_addresses(instruction: Instruction, vector: str, base: str | None) -> Addresses:
    """Return what computes the address of each active lane: a pair of registers, or a base and an offset of 32 bits."""
    offset = np.int64(_offset(instruction))
    index = _index(instruction, vector)
    if base is None or base == "off":

        def of_pairs(wave: Wave) -> NDArray[np.uint64]:
            low = wave.v[index][wave.mask].astype(np.uint64)
            high = wave.v[index + 1][wave.mask].astype(np.uint64)
            return ((low | (high << np.uint64(32))).view(np.int64) + offset).view(np.uint64)

        return of_pairs
    start = scalar_reader(instruction, base, wide=True)

    def of_offsets(wave: Wave) -> NDArray[np.uint64]:
        return (wave.v[index][wave.mask].astype(np.int64) + np.int64(start(wave)) + offset).view(np.uint64)

    return of_offsets


def compile_access(instruction: Instruction) -> Step | None:
    """Return what executes a memory instruction, or None if it is none of those known."""
    name = instruction.name
    for pattern, compiler in (
        (r"s_load_dword(?:x(\d+))?", _scalar_load),
        (r"(?:global|flat)_load_(\w+)", _load),
        (r"(?:global|flat)_store_(\w+)", _store),
        (r"(?:global|flat)_atomic_(\w+?)(_x2)?", _atomic),
        (r"scratch_(load|store)_(dword(?:x\d)?)", _private),
        (r"ds_read(2?)(st64)?_(\w+)", _shared_load),
        (r"ds_write(2?)(st64)?_(\w+)", _shared_store),
    ):
        match = re.fullmatch(pattern, name)
        if match is not None:
            unknown = set(instruction.modifiers) - _CACHE
            if unknown:
                raise instruction.refuse(f"modifier {', '.join(sorted(unknown))}")
            return compiler(instruction, match)
    return None


def _scalar_load(instruction: Instruction, match: re.Match[str]) -> Step:
    count = int(match[1] or 1)
    target, base, offset = instruction.operands
    found = register(target)
    if found is None or found[0] != "s":
        raise instruction.refuse(f"destination {target}")
    first = found[1]
    start = scalar_reader(instruction, base, wide=True)
    move = scalar_reader(instruction, offset, wide=False)
    constant = _offset(instruction)

    def step(wave: Wave, memory: Memory, _: SharedMemory) -> None:
        bits = memory.word((start(wave) + move(wave) + constant) & ~3, 4 * count)
        for part in range(count):
            wave.set_word(first + part, (bits >> (32 * part)) & 0xFFFFFFFF)

    return step


def _load(instruction: Instruction, match: re.Match[str]) -> Step:
    kind, upper = match[1].removesuffix("_hi"), match[1].endswith("_hi")
    partial = kind.endswith("_d16") or upper
    kind = kind.removesuffix("_d16")
    index = _index(instruction, instruction.operands[0])
    addresses = _global_addresses(instruction, *_vector_and_base(instruction.operands[1:]))
    if kind in _SIZES and kind.startswith("dword"):
        size = _SIZES[kind]

        def load_words(wave: Wave, memory: Memory, _: SharedMemory) -> None:
            if wave.mask.any():
                _write_bytes(wave, index, memory.load(addresses(wave), size), wave.mask)

        return load_words
    if kind not in _PARTS:
        raise instruction.refuse("load")
    size, signed = _PARTS[kind]

    def load_part(wave: Wave, memory: Memory, _: SharedMemory) -> None:
        if not wave.mask.any():
            return
        words = _extended(memory.load(addresses(wave), size), signed=signed).view(np.uint32)[:, 0]
        if partial:
            old = wave.v[index][wave.mask]
            half = words & U(0xFFFF)
            words = (old & U(0xFFFF)) | (half << U(16)) if upper else (old & U(0xFFFF0000)) | half
        wave.v[index][wave.mask] = words

    return load_part


def _vector_and_base(operands: tuple[str, ...]) -> tuple[str, str | None]:
    return operands[0], operands[1] if len(operands) > 1 else None


def _store(instruction: Instruction, match: re.Match[str]) -> Step:
    upper = match[1].endswith("_d16_hi")
    kind = match[1].removesuffix("_d16_hi")
    if kind not in _SIZES:
        raise instruction.refuse("store")
    size = _SIZES[kind]
    vector, data, *base = instruction.operands
    index = _index(instruction, data)
    addresses = _global_addresses(instruction, vector, base[0] if base else None)

    def step(wave: Wave, memory: Memory, _: SharedMemory) -> None:
        if not wave.mask.any():
            return
        values = _read_bytes(wave, index, 4 if upper else size, wave.mask)
        memory.store(addresses(wave), values[:, 2 : 2 + size] if upper else values)

    return step


def _atomic(instruction: Instruction, match: re.Match[str]) -> Step:
    operation, size = match[1], 8 if match[2] else 4
    if operation not in {*_ATOMICS, "cmpswap"}:
        raise instruction.refuse("atomic operation")
    returns = "sc0" in instruction.modifiers or "glc" in instruction.modifiers
    # Some stores of an atomic carry no value back although sc0 is a scope bit: a destination tells them apart.
    operands = list(instruction.operands)
    expected = 4 if "off" in operands or operands[-1].startswith("s") else 3
    out = _index(instruction, operands.pop(0)) if returns and len(operands) == expected else None
    vector, data, *base = operands
    index = _index(instruction, data)
    addresses = _global_addresses(instruction, vector, base[0] if base else None)
    words = size // 4

    def step(wave: Wave, memory: Memory, _: SharedMemory) -> None:
        lanes = np.flatnonzero(wave.mask)
        for lane, address in zip(lanes, addresses(wave), strict=True):
            value = sum(int(wave.v[index + part][lane]) << (32 * part) for part in range(words))
            old = memory.word(int(address), size)
            if operation == "cmpswap":
                compared = sum(int(wave.v[index + words + part][lane]) << (32 * part) for part in range(words))
                new = value if old == compared else old
            else:
                new = _ATOMICS[operation](old, value, 8 * size)
            memory.set_word(int(address), new, size)
            if out is not None:
                for part in range(words):
                    wave.v[out + part][lane] = (old >> (32 * part)) & 0xFFFFFFFF

    return step


def _private(instruction: Instruction, match: re.Match[str]) -> Step:
    """Private memory of each lane; addresses are a vector register, a scalar one, both or neither, plus a constant."""
    loads, size = match[1] == "load", _SIZES[match[2]]
    operands = list(instruction.operands)
    value = _index(instruction, operands.pop(0 if loads else 1))
    vector, base = operands
    index = None if vector == "off" else _index(instruction, vector)
    start = None if base == "off" else scalar_reader(instruction, base, wide=False)
    constant = _offset(instruction)

    def step(wave: Wave, _: Memory, __: SharedMemory) -> None:
        lanes = np.flatnonzero(wave.mask)
        if not len(lanes):
            return
        offsets = np.full(len(lanes), constant + (start(wave) if start is not None else 0), np.int64)
        if index is not None:
            offsets += wave.v[index][lanes]
        if offsets.min() < 0 or offsets.max() + size > wave.private.shape[1]:
            raise MemoryFaultError(
                f"private memory of {wave.private.shape[1]} bytes, at {offsets.min()} ... {offsets.max()}"
            )
        places = (lanes[:, None], offsets[:, None] + np.arange(size))
        if loads:
            _write_bytes(wave, value, wave.private[places], wave.mask)
        else:
            wave.private[places] = _read_bytes(wave, value, size, wave.mask)

    return step


def _shared_offsets(instruction: Instruction, *, two: bool, wide: bool, size: int) -> list[int]:
    if not two:
        return [_offset(instruction)]
    unit = size * (64 if wide else 1)
    return [unit * _offset(instruction, "offset0"), unit * _offset(instruction, "offset1")]


def _shared_addresses(wave: Wave, index: int, offset: int) -> NDArray[np.uint64]:
    return wave.v[index][wave.mask].astype(np.uint64) + np.uint64(offset)


def _shared_load(instruction: Instruction, match: re.Match[str]) -> Step:
    target, address = (_index(instruction, text) for text in instruction.operands)
    kind = match[3]
    if kind in _SHARED:
        size, signed = _SHARED[kind]
    elif kind in _SHARED_SIZES:
        size, signed = _SHARED_SIZES[kind], False
    else:
        raise instruction.refuse("shared load")
    offsets = _shared_offsets(instruction, two=bool(match[1]), wide=bool(match[2]), size=size)

    def step(wave: Wave, _: Memory, shared: SharedMemory) -> None:
        if not wave.mask.any():
            return
        found = [shared.load(_shared_addresses(wave, address, offset), size, wave.index) for offset in offsets]
        values = np.concatenate(found, axis=1)
        _write_bytes(wave, target, _extended(values, signed=signed) if size < 4 else values, wave.mask)

    return step


def _shared_store(instruction: Instruction, match: re.Match[str]) -> Step:
    address, *data = (_index(instruction, text) for text in instruction.operands)
    upper = match[3].endswith("_d16_hi")
    kind = match[3].removesuffix("_d16_hi")
    if kind not in _SHARED_SIZES:
        raise instruction.refuse("shared store")
    size = _SHARED_SIZES[kind]
    offsets = _shared_offsets(instruction, two=bool(match[1]), wide=bool(match[2]), size=size)

    def step(wave: Wave, _: Memory, shared: SharedMemory) -> None:
        if not wave.mask.any():
            return
        for index, offset in zip(data, offsets, strict=True):
            values = _read_bytes(wave, index, 4 if upper else size, wave.mask)
            part = values[:, 2 : 2 + size] if upper else values
            shared.store(_shared_addresses(wave, address, offset), part, wave.index)

    return step
