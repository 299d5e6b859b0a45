"""Scalar instructions: integer arithmetic on the registers that a wave's lanes share, comparisons, branches, EXEC.

Semantics follow the instruction descriptions of AMD's "CDNA3" and "CDNA4" instruction set architecture documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from amdgcn.registers import EXEC, PAIR, WORD, Wave, scalar_reader, scalar_writer

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction

Step = Callable[[Wave], None]
# A result and what it makes of SCC: None leaves it, "nonzero" tests the result, an integer is its new value.
Result = tuple[int, int | None]


def signed(value: int, bits: int = 32) -> int:
    """Return a register's bits as a signed number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _add(a: int, b: int, carry: int = 0) -> Result:
    total = a + b + carry
    return total & WORD, total >> 32


def _sub(a: int, b: int, borrow: int = 0) -> Result:
    return (a - b - borrow) & WORD, int(a < b + borrow)


def _overflowing(total: int) -> Result:
    return total & WORD, int(not -(1 << 31) <= total < 1 << 31)


def _nonzero(value: int) -> Result:
    return value, int(value != 0)


def _field(value: int, packed: int, bits: int, *, sign: bool) -> Result:
    offset, width = packed & (bits - 1), (packed >> 16) & 0x7F
    found = (value >> offset) & ((1 << width) - 1) if width else 0
    if sign and width and found >> (width - 1):
        found -= 1 << width
    return _nonzero(found & ((1 << bits) - 1))


def _first(value: int, bits: int) -> int:
    """Return the lowest set bit, or all ones."""
    return (value & -value).bit_length() - 1 if value & ((1 << bits) - 1) else WORD


def _leading(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else WORD


def _reversed(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


# name: (64-bit operands, function of the sources and SCC)
_TWO_WORDS: dict[str, Callable[[int, int, int], Result]] = {
    "s_add_u32": lambda a, b, _: _add(a, b),
    "s_addc_u32": _add,
    "s_sub_u32": lambda a, b, _: _sub(a, b),
    "s_subb_u32": _sub,
    "s_add_i32": lambda a, b, _: _overflowing(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b, _: _overflowing(signed(a) - signed(b)),
    "s_mul_i32": lambda a, b, _: ((a * b) & WORD, None),
    "s_mul_hi_u32": lambda a, b, _: ((a * b) >> 32, None),
    "s_mul_hi_i32": lambda a, b, _: (((signed(a) * signed(b)) >> 32) & WORD, None),
    "s_min_u32": lambda a, b, _: (min(a, b), int(a <= b)),
    "s_max_u32": lambda a, b, _: (max(a, b), int(a >= b)),
    "s_min_i32": lambda a, b, _: (min(signed(a), signed(b)) & WORD, int(signed(a) <= signed(b))),
    "s_max_i32": lambda a, b, _: (max(signed(a), signed(b)) & WORD, int(signed(a) >= signed(b))),
    "s_lshl_b32": lambda a, b, _: _nonzero((a << (b & 31)) & WORD),
    "s_lshr_b32": lambda a, b, _: _nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b, _: _nonzero((signed(a) >> (b & 31)) & WORD),
    "s_bfe_u32": lambda a, b, _: _field(a, b, 32, sign=False),
    "s_bfe_i32": lambda a, b, _: _field(a, b, 32, sign=True),
    "s_bfm_b32": lambda a, b, _: ((((1 << (a & 31)) - 1) << (b & 31)) & WORD, None),
    "s_absdiff_i32": lambda a, b, _: _nonzero(abs(signed(a) - signed(b)) & WORD),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_pack_ll_b32_b16": lambda a, b, _: ((a & 0xFFFF) | ((b & 0xFFFF) << 16), None),
    "s_pack_lh_b32_b16": lambda a, b, _: ((a & 0xFFFF) | (b & 0xFFFF0000), None),
    "s_pack_hh_b32_b16": lambda a, b, _: ((a >> 16) | (b & 0xFFFF0000), None),
} | {
    f"s_lshl{shift}_add_u32": (lambda a, b, _, shift=shift: ((total := (a << shift) + b) & WORD, int(total > WORD)))
    for shift in (1, 2, 3, 4)
}
_BITWISE: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_TWO_PAIRS: dict[str, Callable[[int, int, int], Result]] = {
    "s_cselect_b64": lambda a, b, c: (a if c else b, None),
}
# The second operand of these is a word.
_PAIR_AND_WORD: dict[str, Callable[[int, int, int], Result]] = {
    "s_lshl_b64": lambda a, b, _: _nonzero((a << (b & 63)) & PAIR),
    "s_lshr_b64": lambda a, b, _: _nonzero(a >> (b & 63)),
    "s_ashr_i64": lambda a, b, _: _nonzero((signed(a, 64) >> (b & 63)) & PAIR),
    "s_bfe_u64": lambda a, b, _: _field(a, b, 64, sign=False),
    "s_bfe_i64": lambda a, b, _: _field(a, b, 64, sign=True),
}


def _masked(function: Callable[[int, int], int], mask: int) -> Callable[[int, int, int], Result]:
    return lambda a, b, _: _nonzero(function(a, b) & mask)


for _name, _function in _BITWISE.items():
    _TWO_WORDS[f"s_{_name}_b32"] = _masked(_function, WORD)
    _TWO_PAIRS[f"s_{_name}_b64"] = _masked(_function, PAIR)

# name: (bits of the destination, bits of the source, function)
_ONE: dict[str, tuple[int, int, Callable[[int], Result]]] = {
    "s_mov_b32": (32, 32, lambda a: (a & WORD, None)),
    "s_mov_b64": (64, 64, lambda a: (a & PAIR, None)),
    "s_movk_i32": (32, 32, lambda a: (signed(a, 16) & WORD, None)),
    "s_not_b32": (32, 32, lambda a: _nonzero(~a & WORD)),
    "s_not_b64": (64, 64, lambda a: _nonzero(~a & PAIR)),
    "s_brev_b32": (32, 32, lambda a: (_reversed(a, 32), None)),
    "s_brev_b64": (64, 64, lambda a: (_reversed(a, 64), None)),
    "s_bcnt1_i32_b32": (32, 32, lambda a: _nonzero(a.bit_count())),
    "s_bcnt1_i32_b64": (32, 64, lambda a: _nonzero(a.bit_count())),
    "s_ff1_i32_b32": (32, 32, lambda a: (_first(a, 32), None)),
    "s_ff1_i32_b64": (32, 64, lambda a: (_first(a, 64), None)),
    "s_flbit_i32_b32": (32, 32, lambda a: (_leading(a, 32), None)),
    "s_flbit_i32_b64": (32, 64, lambda a: (_leading(a, 64), None)),
    "s_sext_i32_i8": (32, 32, lambda a: (signed(a, 8) & WORD, None)),
    "s_sext_i32_i16": (32, 32, lambda a: (signed(a, 16) & WORD, None)),
    "s_abs_i32": (32, 32, lambda a: _nonzero(abs(signed(a)) & WORD)),
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda _: True,
    "s_cbranch_scc0": lambda wave: wave.scc == 0,
    "s_cbranch_scc1": lambda wave: wave.scc == 1,
    "s_cbranch_vccz": lambda wave: wave.pair(106) == 0,
    "s_cbranch_vccnz": lambda wave: wave.pair(106) != 0,
    "s_cbranch_execz": lambda wave: wave.pair(EXEC) == 0,
    "s_cbranch_execnz": lambda wave: wave.pair(EXEC) != 0,
}
# Order of memory operations, hints: the interpreter completes every operation at once.
_NOTHING = frozenset(
    {
        "s_waitcnt",
        "s_waitcnt_vscnt",
        "s_nop",
        "s_sleep",
        "s_setprio",
        "s_inst_prefetch",
        "s_dcache_inv",
        "buffer_wbl2",
        "buffer_inv",
        "buffer_wbinvl1",
        "buffer_wbinvl1_vol",
    }
)


def compile_scalar(instruction: Instruction, labels: dict[str, int]) -> Step | None:
    """Return what executes a scalar instruction, or None if it is none of those known."""
    name = instruction.name
    if name in _NOTHING:
        return lambda _: None
    if name in _BRANCHES:
        return _branch(instruction, labels)
    for compiler in (_computing, _comparing, _saving):
        step = compiler(instruction)
        if step is not None:
            return step
    return None


def _branch(instruction: Instruction, labels: dict[str, int]) -> Step:
    condition = _BRANCHES[instruction.name]
    if instruction.operands[0] not in labels:
        raise instruction.refuse("unknown label")
    target = labels[instruction.operands[0]]

    def step(wave: Wave) -> None:
        if condition(wave):
            wave.pc = target

    return step


def _computing(instruction: Instruction) -> Step | None:
    name, operands = instruction.name, instruction.operands
    if name in {"s_addk_i32", "s_mulk_i32", "s_cmovk_i32"}:
        return _constant(instruction)
    if name in {"s_cmov_b32", "s_cmov_b64"}:
        wide = name.endswith("64")
        move, take = (
            scalar_writer(instruction, operands[0], wide=wide),
            scalar_reader(instruction, operands[1], wide=wide),
        )
        return lambda wave: move(wave, take(wave)) if wave.scc else None
    if name.startswith("s_bitset"):
        return _bitset(instruction)
    if name in _ONE:
        to, of, one = _ONE[name]
        write = scalar_writer(instruction, operands[0], wide=to == 64)
        read = scalar_reader(instruction, operands[1], wide=of == 64)
        bits = PAIR if of == 64 else WORD

        def step_one(wave: Wave) -> None:
            value, scc = one(read(wave) & bits)
            if scc is not None:
                wave.scc = scc
            write(wave, value)

        return step_one
    for table, wide, wide_second in (
        (_TWO_WORDS, False, False),
        (_TWO_PAIRS, True, True),
        (_PAIR_AND_WORD, True, False),
    ):
        if name in table:
            return _of_two(instruction, table[name], wide=wide, wide_second=wide_second)
    return None


def _bitset(instruction: Instruction) -> Step:
    """Compile `s_bitset0_b32` and its kin: one bit of the destination becomes 0 or 1; SCC stays."""
    kind, _, width = instruction.name.removeprefix("s_bitset").partition("_")
    if kind not in {"0", "1"} or width not in {"b32", "b64"}:
        raise instruction.refuse(f"unknown instruction {instruction.name}")
    wide = width == "b64"
    write = scalar_writer(instruction, instruction.operands[0], wide=wide)
    read = scalar_reader(instruction, instruction.operands[0], wide=wide)
    number = scalar_reader(instruction, instruction.operands[1], wide=False)

    def step(wave: Wave) -> None:
        bit = 1 << (number(wave) & (63 if wide else 31))
        write(wave, read(wave) | bit if kind == "1" else read(wave) & ~bit & (PAIR if wide else WORD))

    return step


def _of_two(
    instruction: Instruction, function: Callable[[int, int, int], Result], *, wide: bool, wide_second: bool
) -> Step:
    write = scalar_writer(instruction, instruction.operands[0], wide=wide)
    first = scalar_reader(instruction, instruction.operands[1], wide=wide)
    second = scalar_reader(instruction, instruction.operands[2], wide=wide_second)
    mask, mask_second = PAIR if wide else WORD, PAIR if wide_second else WORD

    def step(wave: Wave) -> None:
        value, scc = function(first(wave) & mask, second(wave) & mask_second, wave.scc)
        if scc is not None:
            wave.scc = scc
        write(wave, value)

    return step


def _constant(instruction: Instruction) -> Step:
    """Compile an instruction whose second operand is a signed constant of 16 bits."""
    write = scalar_writer(instruction, instruction.operands[0], wide=False)
    read = scalar_reader(instruction, instruction.operands[0], wide=False)
    value = signed(int(instruction.operands[1], 0), 16)

    def add(wave: Wave) -> None:
        total = signed(read(wave)) + value
        wave.scc = int(not -(1 << 31) <= total < 1 << 31)
        write(wave, total & WORD)

    def multiply(wave: Wave) -> None:
        write(wave, (signed(read(wave)) * value) & WORD)

    def move(wave: Wave) -> None:
        if wave.scc:
            write(wave, value & WORD)

    return {"s_addk_i32": add, "s_mulk_i32": multiply, "s_cmovk_i32": move}[instruction.name]


def _comparing(instruction: Instruction) -> Step | None:
    name, operands = instruction.name, instruction.operands
    family, _, rest = name.removeprefix("s_").partition("_")
    if family in {"bitcmp0", "bitcmp1"}:
        wide = rest == "b64"
        value, bit = (
            scalar_reader(instruction, operands[0], wide=wide),
            scalar_reader(instruction, operands[1], wide=False),
        )
        wanted = int(family[-1])

        def test(wave: Wave) -> None:
            wave.scc = int((value(wave) >> (bit(wave) & (63 if wide else 31))) & 1 == wanted)

        return test
    word, _, kind = rest.partition("_")
    if family not in {"cmp", "cmpk"} or word not in _COMPARISONS or kind not in {"u32", "i32", "u64"}:
        return None
    compare, wide = _COMPARISONS[word], kind == "u64"
    mask = PAIR if wide else WORD
    first = scalar_reader(instruction, operands[0], wide=wide)
    second = scalar_reader(instruction, operands[1], wide=wide)

    def step(wave: Wave) -> None:
        a, b = first(wave) & mask, second(wave) & mask
        wave.scc = int(compare(signed(a), signed(b)) if kind == "i32" else compare(a, b))

    return step


def _saving(instruction: Instruction) -> Step | None:
    """Compile `s_OP_saveexec_b64`: EXEC = source OP EXEC; the destination gets the old EXEC."""
    name = instruction.name
    operation = name.removeprefix("s_").removesuffix("_saveexec_b64")
    if not name.endswith("_saveexec_b64") or operation not in {*_BITWISE, "andn1", "orn1"}:
        return None
    function = {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}.get(operation) or _BITWISE[operation]
    write = scalar_writer(instruction, instruction.operands[0], wide=True)
    read = scalar_reader(instruction, instruction.operands[1], wide=True)

    def step(wave: Wave) -> None:
        source, active = read(wave) & PAIR, wave.pair(EXEC)
        result = function(source, active) & PAIR
        write(wave, active)
        wave.set_exec(result)
        wave.scc = int(result != 0)

    return step
