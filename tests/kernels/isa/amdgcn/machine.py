"""Runs a kernel: blocks of waves of 64 lanes, in an order that the caller chooses, with barriers between them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from amdgcn.accesses import compile_access
from amdgcn.conversions import compile_conversion
from amdgcn.errors import HangError, IsaError, UnsupportedError
from amdgcn.lanes import compile_lanes
from amdgcn.memory import Memory, SharedMemory
from amdgcn.registers import LANES, Wave
from amdgcn.scalar import compile_scalar
from amdgcn.vector import compile_vector

if TYPE_CHECKING:
    from amdgcn.assembly import Instruction, Kernel

Step = Callable[[Wave, Memory, SharedMemory], None]
# User registers in the order in which the hardware fills them, with their number of words.
_USER_REGISTERS = (
    ("amdhsa_user_sgpr_dispatch_ptr", 2),
    ("amdhsa_user_sgpr_queue_ptr", 2),
    ("amdhsa_user_sgpr_kernarg_segment_ptr", 2),
    ("amdhsa_user_sgpr_dispatch_id", 2),
    ("amdhsa_user_sgpr_private_segment_size", 1),
)
INSTRUCTION_LIMIT = 2_000_000


@dataclass(frozen=True)
class Options:
    """How a run is made hard.

    Attributes:
        seed: of the poison in registers and shared memory, and of every random choice.
        order: "forward", "backward" or "shuffled" order of blocks and waves.
        quantum: greatest number of instructions that a wave runs before another gets its turn; None: up to a barrier.
        reciprocal_error: units in the last place that V_RCP_F32 is wrong by.
        detect_races: raise RaceError for shared memory touched by two waves without a barrier.
    """

    seed: int = 0
    order: str = "forward"
    quantum: int | None = None
    reciprocal_error: int = 0
    detect_races: bool = True


def _end(wave: Wave, _: Memory, __: SharedMemory) -> None:
    wave.ended = True


def _barrier(wave: Wave, _: Memory, __: SharedMemory) -> None:
    wave.waiting = True


def compile_instruction(instruction: Instruction, kernel: Kernel, options: Options) -> Step:
    """Return what executes one instruction; raise UnsupportedError, naming it, if it is not modelled."""
    if instruction.name == "s_endpgm":
        return _end
    if instruction.name == "s_barrier":
        return _barrier
    access = compile_access(instruction)
    if access is not None:
        return access
    for compiler in (
        partial(compile_scalar, labels=kernel.labels),
        compile_lanes,
        partial(compile_conversion, target=kernel.target),
        partial(compile_vector, reciprocal_error=options.reciprocal_error),
    ):
        step = compiler(instruction)
        if step is not None:
            return partial(_without_memory, step)
    raise instruction.refuse(f"unknown instruction {instruction.name}")


def _without_memory(step: Callable[[Wave], None], wave: Wave, _: Memory, __: SharedMemory) -> None:
    step(wave)


@dataclass(frozen=True)
class Pointers:
    """Addresses that a wave may get in its first registers."""

    arguments: int
    packet: int


def _dispatch_packet(kernel: Kernel, blocks: int, threads: int, arguments: int) -> bytes:
    """Return the 64 bytes of an HSA kernel dispatch packet, one-dimensional."""
    return struct.pack(
        "<6H5I4Q",
        *(0, 1, threads, 1, 1, 0),
        *(blocks * threads, 1, 1, kernel.private_bytes, kernel.shared_bytes),
        *(0, arguments, 0, 0),
    )


class Program:
    """A kernel as functions, one an instruction.

    Args:
        kernel: what to run.
        options: how.
        lazy: make each function when its instruction is first reached; most of a large kernel never is.

    Raises:
        UnsupportedError: a setting of the descriptor, or an instruction (unless `lazy`), is not modelled.
    """

    def __init__(self, kernel: Kernel, options: Options | None = None, *, lazy: bool = False) -> None:
        kernel.check()
        self.kernel = kernel
        self.options = options or Options()
        count = len(kernel.instructions)
        self.code: list[Step] = (
            [partial(self._first, position) for position in range(count)]
            if lazy
            else [self._compile(position) for position in range(count)]
        )
        self._times = [0] * len(self.code)

    def _compile(self, position: int) -> Step:
        return compile_instruction(self.kernel.instructions[position], self.kernel, self.options)

    def _first(self, position: int, wave: Wave, memory: Memory, shared: SharedMemory) -> None:
        self.code[position] = self._compile(position)
        self.code[position](wave, memory, shared)

    @property
    def executed(self) -> Counter[str]:
        """How often each instruction was executed so far, by name."""
        found: Counter[str] = Counter()
        for instruction, times in zip(self.kernel.instructions, self._times, strict=True):
            if times:
                found[instruction.name] += times
        return found

    def run(self, memory: Memory, blocks: int, threads: int, arguments: bytes) -> None:
        """Execute all blocks of a launch.

        Args:
            memory: what the kernel's pointers point into.
            blocks: number of blocks, one-dimensional.
            threads: threads a block, a multiple of 64.
            arguments: the kernel's arguments as the descriptor lays them out.

        Raises:
            MemoryFaultError: an access outside the memory.
            RaceError: shared memory used by two waves without a barrier.
            HangError: more instructions than any test kernel needs.
        """
        if threads % LANES:
            raise UnsupportedError(f"{threads} threads a block: whole waves of {LANES} are modelled")
        padded = arguments.ljust(self.kernel.argument_bytes, b"\xa5")
        base = memory.map("arguments", np.frombuffer(padded, np.uint8).copy(), writable=False)
        packet = _dispatch_packet(self.kernel, blocks, threads, base)
        pointers = Pointers(base, memory.map("dispatch packet", np.frombuffer(packet, np.uint8).copy(), writable=False))
        random = np.random.default_rng(self.options.seed)
        # Overflows, infinities and NaNs are what the kernels are tested with.
        with np.errstate(all="ignore"):
            for block in self._ordered(blocks, random):
                self._run_block(memory, block, threads // LANES, pointers, random)

    def _ordered(self, count: int, random: np.random.Generator) -> list[int]:
        order = list(range(count))
        if self.options.order == "backward":
            order.reverse()
        elif self.options.order == "shuffled":
            order = [int(item) for item in random.permutation(count)]
        return order

    def _wave(self, index: int, block: int, pointers: Pointers, random: np.random.Generator) -> Wave:
        descriptor = self.kernel.descriptor
        wave = Wave(self.kernel.vector_registers, self.kernel.private_bytes, random)
        wave.index = index
        position = 0
        for name, words in _USER_REGISTERS:
            if descriptor.get(name):
                if name == "amdhsa_user_sgpr_kernarg_segment_ptr":
                    wave.set_pair(position, pointers.arguments)
                elif name == "amdhsa_user_sgpr_dispatch_ptr":
                    wave.set_pair(position, pointers.packet)
                position += words
        for axis, value in (("x", block), ("y", 0), ("z", 0)):
            if descriptor.get(f"amdhsa_system_sgpr_workgroup_id_{axis}"):
                wave.set_word(position, value)
                position += 1
        # One dimension: the packed index of a work item is its x.
        wave.v[0] = np.arange(LANES, dtype=np.uint32) + np.uint32(index * LANES)
        return wave

    def _run_block(
        self, memory: Memory, block: int, count: int, pointers: Pointers, random: np.random.Generator
    ) -> None:
        shared = SharedMemory(self.kernel.shared_bytes, random)
        shared.detect_races = self.options.detect_races
        waves = [self._wave(index, block, pointers, random) for index in range(count)]
        order = self._ordered(count, random)
        while True:
            ready = [index for index in order if not waves[index].ended and not waves[index].waiting]
            if not ready:
                arrived = [wave for wave in waves if not wave.ended]
                if not arrived:
                    return
                for wave in arrived:
                    wave.waiting = False
                shared.barrier()
                continue
            quantum = self.options.quantum
            if quantum is None:
                self._run_wave(waves[ready[0]], memory, shared, INSTRUCTION_LIMIT)
            else:
                chosen = ready[int(random.integers(len(ready)))]
                self._run_wave(waves[chosen], memory, shared, int(random.integers(1, quantum + 1)))

    def _run_wave(self, wave: Wave, memory: Memory, shared: SharedMemory, steps: int) -> None:
        code, times = self.code, self._times
        try:
            for _ in range(steps):
                position = wave.pc
                wave.pc = position + 1
                times[position] += 1
                wave.executed += 1
                code[position](wave, memory, shared)
                if wave.ended or wave.waiting:
                    break
        except IsaError as error:
            at = self.kernel.instructions[wave.pc - 1]
            raise type(error)(f"{self.kernel.name}, line {at.line}, {at.text}: {error}") from error
        if wave.executed >= INSTRUCTION_LIMIT:
            raise HangError(f"{self.kernel.name}: wave {wave.index} executed {wave.executed} instructions")
