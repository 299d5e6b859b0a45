"""Instructions that move values between lanes, or between lanes and scalar registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from amdgcn.registers import (
    LANES,
    Mask,
    Reader,
    Wave,
    bits_reader,
    register,
    scalar_reader,
    scalar_writer,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amdgcn.assembly import Instruction

Step = Callable[[Wave], None]
U = np.uint32
LANE = np.arange(LANES)
ROW = 16


def _dpp_sources(  # noqa: PLR0911 - one case a movement
    instruction: Instruction,
) -> tuple[NDArray[np.int64], Mask]:
    """Return the lane that each lane reads, and whether there is one."""
    modifiers = instruction.modifiers
    within, row = LANE % ROW, LANE - LANE % ROW
    valid: Mask = np.ones(LANES, np.bool_)
    if "quad_perm" in modifiers:
        order = np.array([int(item) for item in modifiers["quad_perm"].strip("[]").split(",")])
        return LANE - LANE % 4 + order[LANE % 4], valid
    if "row_shl" in modifiers:
        found = within + int(modifiers["row_shl"])
        return np.minimum(found, ROW - 1) + row, found < ROW
    if "row_shr" in modifiers:
        found = within - int(modifiers["row_shr"])
        return np.maximum(found, 0) + row, found >= 0
    if "row_ror" in modifiers:
        return row + (within - int(modifiers["row_ror"])) % ROW, valid
    if "row_mirror" in modifiers:
        return row + ROW - 1 - within, valid
    if "row_half_mirror" in modifiers:
        return LANE - LANE % 8 + 7 - LANE % 8, valid
    if "row_newbcast" in modifiers:
        return row + int(modifiers["row_newbcast"]), valid
    if modifiers.get("row_bcast") == "15":
        return np.maximum(row - 1, 0), row > 0
    if modifiers.get("row_bcast") == "31":
        return np.full(LANES, 31), LANE >= 32
    raise instruction.refuse("lane movement")


def dpp_reader(instruction: Instruction, read: Reader) -> Reader:
    """Return what reads a source moved between lanes, for moves that leave no lane without a value.

    A lane whose source does not exist or is inactive reads 0 with `bound_ctrl`; without it, it would keep its old
    destination, which is modelled only when no lane is concerned.
    """
    lanes, exists = _dpp_sources(instruction)
    for mask in ("row_mask", "bank_mask"):
        if int(instruction.modifiers.get(mask, "0xf"), 0) != 0xF:
            raise instruction.refuse(mask)
    zeros = "bound_ctrl" in instruction.modifiers

    def moved(wave: Wave) -> np.ndarray:
        value = np.broadcast_to(read(wave), LANES)[lanes]
        usable = exists & wave.mask[lanes]
        if not zeros and not usable[wave.mask].all():
            raise instruction.refuse("a lane that reads from no active lane")
        return np.where(usable, value, U(0))

    return moved


def compile_lanes(instruction: Instruction) -> Step | None:
    """Return what executes a lane instruction, or None if it is none of those known."""
    compiler = {
        "v_readfirstlane_b32": _read_first,
        "v_readlane_b32": _read_lane,
        "v_writelane_b32": _write_lane,
        "v_mbcnt_lo_u32_b32": _count_below,
        "v_mbcnt_hi_u32_b32": _count_below,
        "ds_bpermute_b32": _permute,
        "ds_permute_b32": _permute,
        "ds_swizzle_b32": _swizzle,
    }.get(instruction.name)
    return compiler(instruction) if compiler is not None else None


def _vector(instruction: Instruction, text: str) -> int:
    found = register(text)
    if found is None or found[0] != "v":
        raise instruction.refuse(f"operand {text}")
    return found[1]


def _read_first(instruction: Instruction) -> Step:
    write = scalar_writer(instruction, instruction.operands[0], wide=False)
    index = _vector(instruction, instruction.operands[1])

    def step(wave: Wave) -> None:
        lane = int(np.argmax(wave.mask)) if wave.mask.any() else 0
        write(wave, int(wave.v[index][lane]))

    return step


def _read_lane(instruction: Instruction) -> Step:
    write = scalar_writer(instruction, instruction.operands[0], wide=False)
    index = _vector(instruction, instruction.operands[1])
    lane = scalar_reader(instruction, instruction.operands[2], wide=False)
    return lambda wave: write(wave, int(wave.v[index][lane(wave) % LANES]))


def _write_lane(instruction: Instruction) -> Step:
    index = _vector(instruction, instruction.operands[0])
    value = scalar_reader(instruction, instruction.operands[1], wide=False)
    lane = scalar_reader(instruction, instruction.operands[2], wide=False)

    def step(wave: Wave) -> None:
        wave.v[index][lane(wave) % LANES] = value(wave) & 0xFFFFFFFF

    return step


def _count_below(instruction: Instruction) -> Step:
    """V_MBCNT: set bits of the mask's half below this lane, plus a number."""
    low = instruction.name.startswith("v_mbcnt_lo")
    below = [(1 << int(lane)) - 1 for lane in LANE]
    mask = np.array([bits & 0xFFFFFFFF if low else bits >> 32 for bits in below], np.uint32)
    bits = bits_reader(instruction, instruction.operands[1], "u")
    start = bits_reader(instruction, instruction.operands[2], "u")
    index = _vector(instruction, instruction.operands[0])

    def step(wave: Wave) -> None:
        count = np.bitwise_count(bits(wave) & mask).astype(np.uint32)
        wave.set_vector(index, count + start(wave))

    return step


def _permute(instruction: Instruction) -> Step:
    """DS_BPERMUTE / DS_PERMUTE: pull from, or push to, the lane at address / 4; inactive lanes give 0."""
    index, address, value = (_vector(instruction, text) for text in instruction.operands)
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    pulls = instruction.name == "ds_bpermute_b32"

    def step(wave: Wave) -> None:
        lanes = ((wave.v[address].astype(np.int64) + offset) >> 2) % LANES
        given = np.where(wave.mask, wave.v[value], U(0))
        if pulls:
            result = given[lanes]
        else:
            result = np.zeros(LANES, np.uint32)
            active = np.flatnonzero(wave.mask)
            result[lanes[active]] = given[active]
        wave.set_vector(index, result)

    return step


def _swizzle(instruction: Instruction) -> Step:
    """DS_SWIZZLE in its bit mode (and, or, xor of the lane's number within 32) or its quad mode."""
    index, value = (_vector(instruction, text) for text in instruction.operands)
    text = instruction.modifiers.get("offset", "0")
    if not text.removeprefix("0x").isalnum():
        raise instruction.refuse("swizzle written as a macro")
    pattern = int(text, 0)
    within, group = LANE % 32, LANE - LANE % 32
    if pattern >> 15:
        if pattern >> 8 != 0x80:
            raise instruction.refuse("swizzle mode")
        lanes = LANE - LANE % 4 + ((pattern >> (2 * (LANE % 4))) & 3)
    else:
        lanes = group + (((within & (pattern & 31)) | ((pattern >> 5) & 31)) ^ ((pattern >> 10) & 31))

    def step(wave: Wave) -> None:
        given = np.where(wave.mask, wave.v[value], U(0))
        wave.set_vector(index, given[lanes])

    return step
