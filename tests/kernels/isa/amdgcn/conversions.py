"""Instructions that convert packs of small floats: which bytes they read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from amdgcn.registers import Wave, bits_reader, register
from amdgcn.small_floats import decode_e2m1, decode_e4m3, encode_bf16, encode_e2m1, encode_e4m3
from amdgcn.vector import destination, flags, source

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction

Step = Callable[[Wave], None]
U = np.uint32
ALLOWED = {"op_sel", "src0_sel"}


def compile_conversion(instruction: Instruction, target: str) -> Step | None:
    """Return what executes a conversion of small floats on `target`, or None if it is none of those known."""
    compiler = {
        "v_cvt_pk_fp8_f32": _pack_e4m3,
        "v_cvt_pk_f32_fp8": _unpack_e4m3,
        "v_cvt_f32_fp8": _unpack_one_e4m3,
        "v_cvt_scalef32_pk_fp4_f32": _pack_e2m1,
        "v_cvt_scalef32_pk_fp4_bf16": _pack_e2m1_bf16,
        "v_cvt_scalef32_pk_f32_fp4": _unpack_e2m1,
        "v_cvt_pk_bf16_f32": _pack_bf16,
    }.get(instruction.name)
    if compiler is None:
        return None
    unknown = set(instruction.modifiers) - ALLOWED
    if unknown:
        raise instruction.refuse(f"modifier {', '.join(sorted(unknown))}")
    return compiler(instruction, target)


def _register(instruction: Instruction) -> int:
    found = register(instruction.operands[0])
    if found is None or found[0] != "v":
        raise instruction.refuse("destination")
    return found[1]


def _pack_e4m3(instruction: Instruction, target: str) -> Step:
    """Two fp32 values to two bytes in the half that op_sel's last bit chooses; the other half stays."""
    index = _register(instruction)
    first, second = (source(instruction, text, "f", i) for i, text in enumerate(instruction.operands[1:]))
    shift = 16 * flags(instruction, "op_sel", 3)[2]
    keep = U(0xFFFF << (16 - shift))

    def step(wave: Wave) -> None:
        pair = encode_e4m3(first(wave), target) | (encode_e4m3(second(wave), target) << U(8))
        wave.set_vector(index, (wave.v[index] & keep) | (pair << U(shift)))

    return step


def _unpack_e4m3(instruction: Instruction, target: str) -> Step:
    """Two bytes of the half that the selection names, to a pair of fp32."""
    index = _register(instruction)
    read = _half_or_byte(instruction)

    def step(wave: Wave) -> None:
        codes = np.copy(read(wave))
        wave.set_vector(index, decode_e4m3(codes, target).view(np.uint32))
        wave.set_vector(index + 1, decode_e4m3(codes >> U(8), target).view(np.uint32))

    return step


def _unpack_one_e4m3(instruction: Instruction, target: str) -> Step:
    write = destination(instruction, instruction.operands[0], "f")
    read = _half_or_byte(instruction)
    return lambda wave: write(wave, decode_e4m3(read(wave), target))


def _half_or_byte(instruction: Instruction) -> Callable[[Wave], np.ndarray]:
    if "op_sel" in instruction.modifiers:
        raise instruction.refuse("op_sel")
    return source(instruction, instruction.operands[1], "u", 0)


def _pack_e2m1(instruction: Instruction, _: str) -> Step:
    """Two fp32 values to one byte, chosen by op_sel's last two bits; the others stay."""
    index = _register(instruction)
    first, second, scale = (source(instruction, text, "f", i) for i, text in enumerate(instruction.operands[1:]))
    low, high = flags(instruction, "op_sel", 4)[2:]
    shift = U(8 * (low + 2 * high))

    def step(wave: Wave) -> None:
        by = scale(wave)
        byte = encode_e2m1(first(wave), by) | (encode_e2m1(second(wave), by) << U(4))
        wave.set_vector(index, (wave.v[index] & ~(U(0xFF) << shift)) | (byte << shift))

    return step


def _pack_e2m1_bf16(instruction: Instruction, _: str) -> Step:
    """Two bf16 values of a word to one byte."""
    index = _register(instruction)
    words = bits_reader(instruction, instruction.operands[1], "u")
    scale = source(instruction, instruction.operands[2], "f", 1)
    low, high = flags(instruction, "op_sel", 4)[2:]
    shift = U(8 * (low + 2 * high))

    def step(wave: Wave) -> None:
        by, both = scale(wave), np.asarray(words(wave))
        even = encode_e2m1((both << U(16)).view(np.float32), by)
        odd = encode_e2m1((both & U(0xFFFF0000)).view(np.float32), by)
        wave.set_vector(index, (wave.v[index] & ~(U(0xFF) << shift)) | ((even | (odd << U(4))) << shift))

    return step


def _unpack_e2m1(instruction: Instruction, _: str) -> Step:
    """One byte, chosen by op_sel's first two bits, to a pair of fp32."""
    index = _register(instruction)
    read = bits_reader(instruction, instruction.operands[1], "u")
    scale = source(instruction, instruction.operands[2], "f", 1)
    low, high = flags(instruction, "op_sel", 3)[:2]
    shift = U(8 * (low + 2 * high))

    def step(wave: Wave) -> None:
        codes, by = read(wave) >> shift, scale(wave)
        first, second = decode_e2m1(codes, by), decode_e2m1(codes >> U(4), by)
        wave.set_vector(index, first.view(np.uint32))
        wave.set_vector(index + 1, second.view(np.uint32))

    return step


def _pack_bf16(instruction: Instruction, _: str) -> Step:
    write = destination(instruction, instruction.operands[0], "u")
    first, second = (source(instruction, text, "f", i) for i, text in enumerate(instruction.operands[1:]))
    return lambda wave: write(wave, encode_bf16(first(wave)) | (encode_bf16(second(wave)) << U(16)))
