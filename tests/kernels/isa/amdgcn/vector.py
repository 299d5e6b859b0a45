"""Turns a vector instruction into a function: signs, parts of words (SDWA, op_sel) and lane moves (DPP) of operands."""

# mypy: disable-error-code="no-any-return"
# (numpy types operators on arrays of any dtype as Any)

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from amdgcn.floats import FLOATS, PACKED_FLOATS, div_fmas, reciprocal
from amdgcn.integers import COMPARED, COMPARISONS, INTEGERS, PACKED_HALVES, SATURATED, Function
from amdgcn.lanes import dpp_reader
from amdgcn.registers import (
    DTYPES,
    HALF,
    VCC,
    WIDE,
    Mask,
    Reader,
    Wave,
    Words,
    bits_of,
    bits_reader,
    lanes_of,
    mask_reader,
    register,
    scalar_writer,
    strip_signs,
)
from amdgcn.registers import (
    FLOATS as FLOAT_KINDS,
)

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction

Step = Callable[[Wave], None]
U = np.uint32
_SIGN = {"f": U(0x80000000), "h": U(0x8000), "F": np.uint64(1 << 63), "u": U(0x80000000)}
_SDWA = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel"})
_SELECTIONS = {
    "DWORD": (0, 32),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
}
DPP = frozenset(
    {
        "quad_perm",
        "row_shl",
        "row_shr",
        "row_ror",
        "row_bcast",
        "row_newbcast",
        "wave_shl",
        "wave_shr",
        "wave_rol",
        "wave_ror",
        "row_mirror",
        "row_half_mirror",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
    }
)


def flags(instruction: Instruction, name: str, count: int, default: int = 0) -> list[int]:
    """Return a modifier such as `op_sel:[0,1]` as a list of `count` numbers."""
    text = instruction.modifiers.get(name)
    found = [int(item) for item in re.findall(r"\d+", text)] if text else []
    return found + [default] * (count - len(found))


def _select(read: Reader, selection: str, *, extend: bool) -> Reader:
    shift, width = _SELECTIONS[selection]
    if width == 32:
        return read
    mask, sign = U((1 << width) - 1), U(1 << (width - 1))

    def selected(wave: Wave) -> np.ndarray:
        value = (read(wave) >> U(shift)) & mask
        return (value ^ sign) - sign if extend else value

    return selected


def _signs(read: Reader, kind: str, *, negated: bool, magnitude: bool) -> Reader:
    bit = _SIGN[kind]
    if magnitude and negated:
        return lambda wave: read(wave) | bit
    if magnitude:
        return lambda wave: read(wave) & ~bit
    return lambda wave: read(wave) ^ bit


def _typed(read: Reader, kind: str) -> Reader:
    dtype = DTYPES[kind]
    if kind in "uU":
        return read
    if kind in HALF:
        return lambda wave: (read(wave) & U(0xFFFF)).astype(np.uint16).view(dtype)
    return lambda wave: read(wave).view(dtype)


def source(instruction: Instruction, text: str, kind: str, position: int) -> Reader:
    """Return what reads source number `position`, with every modifier of the instruction that concerns it."""
    if kind == "m":
        return mask_reader(instruction, text)
    extend = text.startswith("sext(")
    if extend:
        text = text[5:-1]
    text, negated, magnitude = strip_signs(text)
    read = bits_reader(instruction, text, kind)
    if position == 0 and instruction.encoding == "_dpp":
        read = dpp_reader(instruction, read)
    selection = instruction.modifiers.get(f"src{position}_sel", "DWORD")
    if extend and selection == "DWORD":
        raise instruction.refuse("sign extension of a whole word")
    if kind in WIDE and selection != "DWORD":
        raise instruction.refuse("selection from a pair")
    read = _select(read, selection, extend=extend)
    if kind in HALF and instruction.encoding != "_sdwa" and flags(instruction, "op_sel", position + 1)[position]:
        read = _select(read, "WORD_1", extend=False)
    if negated or magnitude:
        if kind not in FLOAT_KINDS and instruction.name != "v_cndmask_b32":
            raise instruction.refuse("sign modifier on an integer")
        read = _signs(read, kind, negated=negated, magnitude=magnitude)
    return _typed(read, kind)


def as_words(value: np.ndarray, kind: str) -> np.ndarray:
    """Return a result's bits: uint32 (halves with zeros above), or uint64."""
    dtype = DTYPES[kind]
    typed = np.asarray(value, dtype)
    if kind in HALF:
        return typed.view(np.uint16).astype(np.uint32)
    return typed.view(np.uint64 if kind in WIDE else np.uint32)


Writer = Callable[[Wave, np.ndarray], None]


def destination(instruction: Instruction, text: str, kind: str) -> Writer:
    """Return what writes a result to a register of the active lanes."""
    if kind == "m":
        write_mask = scalar_writer(instruction, text, wide=True)
        return lambda wave, value: write_mask(wave, bits_of(np.broadcast_to(value, 64) & wave.mask))
    found = register(text)
    if found is None or found[0] != "v":
        raise instruction.refuse(f"destination {text}")
    index = found[1]
    if kind in WIDE:

        def write_pair(wave: Wave, value: np.ndarray) -> None:
            words = as_words(value, kind)
            wave.set_vector(index, words.astype(np.uint32))
            wave.set_vector(index + 1, (words >> np.uint64(32)).astype(np.uint32))

        return write_pair
    place = _placer(instruction, kind)
    if place is not None:
        return lambda wave, value: wave.set_vector(index, place(wave.v[index], as_words(value, kind)))
    if kind == "u":
        return lambda wave, value: wave.set_vector(index, value)
    return lambda wave, value: wave.set_vector(index, as_words(value, kind))


def _placer(instruction: Instruction, kind: str) -> Callable[[Words, np.ndarray], np.ndarray] | None:
    """Return how a result that fills a part of its register joins the rest, None for a whole one."""
    selection = instruction.modifiers.get("dst_sel", "DWORD")
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    sources = len(instruction.operands) - 1
    if kind in HALF and instruction.encoding != "_sdwa" and flags(instruction, "op_sel", sources + 1)[sources]:
        return lambda old, value: (old & U(0xFFFF)) | (value << U(16))
    shift, width = _SELECTIONS[selection]
    if width == 32:
        return None
    mask = U(((1 << width) - 1) << shift)
    if unused == "UNUSED_PAD":
        return lambda _, value: (value << U(shift)) & mask
    if unused == "UNUSED_PRESERVE":
        return lambda old, value: (old & ~mask) | ((value << U(shift)) & mask)
    raise instruction.refuse(f"dst_unused {unused}")


def _allow(instruction: Instruction, *names: str) -> None:
    allowed = set(names)
    if instruction.encoding == "_sdwa":
        allowed |= _SDWA
    if instruction.encoding == "_dpp":
        allowed |= DPP
    unknown = set(instruction.modifiers) - allowed
    if unknown:
        raise instruction.refuse(f"modifier {', '.join(sorted(unknown))}")


def _apply(function: Function, sources: list[Reader], writers: list[Writer]) -> Step:
    """Return the step: read all sources, compute, write all destinations."""
    if len(writers) == 1:
        write = writers[0]
        if len(sources) == 1:
            (only,) = sources
            return lambda wave: write(wave, function(only(wave)))
        if len(sources) == 2:
            first, second = sources
            return lambda wave: write(wave, function(first(wave), second(wave)))
        return lambda wave: write(wave, function(*[read(wave) for read in sources]))

    def step(wave: Wave) -> None:
        results = function(*[read(wave) for read in sources])
        for write_one, result in zip(writers, results, strict=True):
            write_one(wave, result)

    return step


def _clamped(function: Function) -> Function:
    def clamp(*values: np.ndarray) -> np.ndarray:
        result = np.asarray(function(*values))
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)

    return clamp


def compile_table(instruction: Instruction, signature: str, function: Function) -> Step:
    """Return the step of an instruction with a plain signature."""
    accumulates = signature.endswith("+")
    outs, _, ins = signature.removesuffix("+").partition(":")
    operands = instruction.operands
    expected = len(outs) + len(ins)
    if len(operands) != expected:
        raise instruction.refuse(f"{len(operands)} operands, modelled are {expected}")
    clamp = "clamp" in instruction.modifiers
    halves = bool(set(outs + ins) & HALF)
    clampable = outs[0] in FLOAT_KINDS or instruction.name in SATURATED
    _allow(instruction, *(["clamp"] if clampable else []), *(["op_sel"] if halves else []))
    if clamp:
        function = SATURATED.get(instruction.name) or _clamped(function)
    sources = [source(instruction, operands[len(outs) + i], kind, i) for i, kind in enumerate(ins)]
    if accumulates:
        sources.append(_typed(bits_reader(instruction, operands[0], outs[0]), outs[0]))
    writers = [destination(instruction, operands[i], kind) for i, kind in enumerate(outs)]
    return _apply(function, sources, writers)


def _compile_comparison(instruction: Instruction) -> Step | None:
    match = re.fullmatch(r"v_cmp(x?)_([a-z]+)_([uif]\d\d)", instruction.name)
    if match is None or match[2] not in COMPARISONS:
        return None
    kind, compare = COMPARED[match[3]], COMPARISONS[match[2]]
    _allow(instruction)
    target, *texts = instruction.operands
    first, second = (source(instruction, text, kind, i) for i, text in enumerate(texts))
    write = destination(instruction, target, "m")
    sets_exec = match[1] == "x"

    def step(wave: Wave) -> None:
        found = compare(first(wave), second(wave))
        write(wave, found)
        if sets_exec:
            wave.set_exec(bits_of(np.broadcast_to(found, 64) & wave.mask))

    return step


def _compile_packed(instruction: Instruction) -> Step | None:
    """Compile `v_pk_` instructions: both halves of a word, or both words of a pair."""
    name = instruction.name
    if name == "v_pk_mov_b32":
        return _compile_pair_move(instruction)
    table, wide = (PACKED_FLOATS, True) if name in PACKED_FLOATS else (PACKED_HALVES, False)
    if name not in table:
        return None
    _allow(instruction, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    signature, function = table[name]
    outs, _, ins = signature.partition(":")
    target, *texts = instruction.operands
    count = len(ins)
    halves = []
    for select, negate, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        chosen, negated = flags(instruction, select, count, default), flags(instruction, negate, count)
        readers = []
        for text, kind, high, negative in zip(texts, ins, chosen, negated, strict=True):
            read = _half(instruction, text, wide=wide, high=bool(high))
            if negative:
                read = _signs(read, kind, negated=True, magnitude=False)
            readers.append(_typed(read, kind))
        halves.append(readers)
    found = register(target)
    if found is None:
        raise instruction.refuse(f"destination {target}")
    index, kind = found[1], outs

    def step(wave: Wave) -> None:
        low, high = (as_words(function(*[read(wave) for read in readers]), kind) for readers in halves)
        if wide:
            wave.set_vector(index, low)
            wave.set_vector(index + 1, high)
        else:
            wave.set_vector(index, low | (high << U(16)))

    return step


def _half(instruction: Instruction, text: str, *, wide: bool, high: bool) -> Reader:
    if not wide:
        return _select(bits_reader(instruction, text, "u"), "WORD_1" if high else "WORD_0", extend=False)
    found = register(text)
    if found is None:
        return bits_reader(instruction, text, "f")
    file, index, count = found
    if count != 2:
        raise instruction.refuse(f"operand {text} of 64 bits")
    if file == "s":
        return lambda wave: U(wave.s[index + high])
    return lambda wave: wave.v[index + high]


def _compile_pair_move(instruction: Instruction) -> Step:
    _allow(instruction, "op_sel", "op_sel_hi")
    low, high = flags(instruction, "op_sel", 2)
    first = _half(instruction, instruction.operands[1], wide=True, high=bool(low))
    second = _half(instruction, instruction.operands[2], wide=True, high=bool(high))
    found = register(instruction.operands[0])
    if found is None:
        raise instruction.refuse("destination")
    index = found[1]

    def step(wave: Wave) -> None:
        a, b = np.copy(first(wave)), np.copy(second(wave))
        wave.set_vector(index, a)
        wave.set_vector(index + 1, b)

    return step


def _compile_truth_table(instruction: Instruction) -> Step:
    """V_BITOP3_B32: bit 4a + 2b + c of a table of 8 for the bits a, b, c of the sources."""
    _allow(instruction, "bitop3")
    table = int(instruction.modifiers.get("bitop3", "0"), 0)
    sources = [source(instruction, text, "u", i) for i, text in enumerate(instruction.operands[1:])]

    def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a | b | c)
        for row in range(8):
            if (table >> row) & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return _apply(look_up, sources, [destination(instruction, instruction.operands[0], "u")])


def vcc_lanes(wave: Wave) -> Mask:
    """Return VCC as a mask of lanes."""
    return lanes_of(wave.pair(VCC))


def compile_vector(instruction: Instruction, reciprocal_error: int) -> Step | None:
    """Return what executes a vector instruction, or None if it is none of those known here."""
    name = instruction.name
    if name in {"v_rcp_f32", "v_rcp_iflag_f32"}:
        return compile_table(instruction, "f:f", reciprocal(reciprocal_error))
    if name == "v_div_fmas_f32":
        _allow(instruction)
        sources = [source(instruction, text, "f", i) for i, text in enumerate(instruction.operands[1:])]
        return _apply(div_fmas, [*sources, vcc_lanes], [destination(instruction, instruction.operands[0], "f")])
    if name == "v_bitop3_b32":
        return _compile_truth_table(instruction)
    for table in (INTEGERS, FLOATS):
        if name in table:
            return compile_table(instruction, *table[name])
    return _compile_comparison(instruction) or _compile_packed(instruction)
