"""A GPU made of the interpreter: the native operator of the library with the GPU's host code and its compiled kernels.

`InterpretedGpu.convert` takes what `torch.ops.quant_kernels._convert` takes, on CPU tensors. The launchers of csrc run
as they are (compiled for the host); every kernel that they launch is interpreted, on memory that holds the call's
tensors alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch
from amdgcn import Assembly, Instruction, IsaError, Kernel, Memory, Options, Program
from structures import read_structures
from toolchain import CSRC, Variant, device_texts, host_library

from quant_kernels import direct, library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRUCTURES, VALUES = read_structures(CSRC / "job.h")
Job, Item = STRUCTURES["Job"], STRUCTURES["Item"]
ELEMENTS = {
    torch.float32: "kF32",
    torch.float16: "kF16",
    torch.bfloat16: "kBf16",
    torch.float8_e4m3fn: "kE4m3",
    torch.float8_e4m3fnuz: "kE4m3Fnuz",
    torch.uint8: "kE2m1",
}
SCALES = {torch.float32: "kScaleF32", torch.uint8: "kScaleE8m0", torch.float8_e4m3fn: "kScaleE4m3"}
ROLES = ("source", "source_scale", "source_second", "amax", "data", "scale", "second", "bad", "sums")
READ = frozenset({"source", "source_scale", "source_second", "amax"})
_LAUNCHED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


@cache
def _assemblies(variant: Variant) -> dict[str, Assembly]:
    """Return the text that holds each kernel of a variant."""
    found: dict[str, Assembly] = {}
    for path in device_texts((variant,)).values():
        assembly = Assembly(path.read_text(encoding="utf-8"))
        for name in assembly.names:
            if name in found:
                raise ValueError(f"two kernels are called {name}")
            found[name] = assembly
    return found


@cache
def kernel_of(variant: Variant, name: str) -> Kernel:
    """Return a kernel of a variant by its mangled name."""
    assembly = _assemblies(variant).get(name)
    if assembly is None:
        raise IsaError(f"{variant} has no kernel {name}")
    return assembly.kernel(name)


@cache
def _library() -> ctypes.CDLL:
    host = ctypes.CDLL(str(host_library()))
    host.qk_test_convert.restype = ctypes.c_char_p
    host.qk_test_size.restype = ctypes.c_uint64
    sizes = [host.qk_test_size(index) for index in range(3)]
    read = [ctypes.sizeof(STRUCTURES[name]) for name in ("Job", "Item", "WorkList")]
    if sizes != read:
        raise ValueError(f"structures read from job.h have {read} bytes, the compiler's {sizes}")
    return host


class _Operator:
    """Stands where torch keeps an operator: callable, and by its overload."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.default = function

    def __call__(self, *arguments: object) -> None:
        self.default(*arguments)


class InterpretedGpu:
    """One GPU of a variant, run with the interpreter's options.

    Attributes:
        launched: launches since the start, by kernel.
    """

    def __init__(
        self, variant: Variant, options: Options | None = None, edit: Callable[[Instruction], Instruction] | None = None
    ) -> None:
        self.variant = variant
        self.options = options or Options()
        self.launched: Counter[str] = Counter()
        self._edit = edit
        self._memory = Memory()
        self._error: BaseException | None = None
        self._programs: dict[str, Program] = {}

    @property
    def executed(self) -> Counter[str]:
        """How often each instruction was executed since the start, by name."""
        return sum((program.executed for program in self._programs.values()), Counter())

    @contextmanager
    def installed(self) -> Iterator[InterpretedGpu]:
        """Make the library run every native conversion of CPU tensors here."""
        # The library need not be built: its operator is replaced, and it says that it serves every device.
        # The short way of one small weight has operators of its own: it is told that there are none.
        operator = patch.object(torch.ops.quant_kernels, "_convert", _Operator(self.convert), create=True)
        served = patch.object(library, "_serves", lambda _device: True)
        with operator, served, patch.object(direct, "native_on", lambda _device: False):
            yield self

    def convert(
        self, tensors: list[torch.Tensor], slots: list[int], geometry: list[int], parameters: list[int], stream: int
    ) -> None:
        """Run one work list; the arguments are those of the operator.

        Raises:
            IsaError: what the interpreter found wrong.
            RuntimeError: the launcher refused the list.
        """
        del stream
        self._memory = Memory()
        self._error = None
        places = self._map(tensors, slots)
        job = self._job(tensors, slots, parameters)
        count = len(slots) // len(ROLES)
        items = (Item * count)()
        for index in range(count):
            chosen = dict(zip(ROLES, slots[index * len(ROLES) : (index + 1) * len(ROLES)], strict=True))
            given = {role: (tensors[slot], places[slot]) for role, slot in chosen.items() if slot >= 0}
            self._fill(items[index], given, geometry[4 * index : 4 * index + 4], job)
        host = _library()
        callback = _LAUNCHED(self._launched)
        host.qk_test_on_launch(callback)
        error = host.qk_test_convert(ctypes.byref(job), items, count)
        if self._error is not None:
            raise self._error
        if error is not None:
            raise RuntimeError(error.decode())

    def _map(self, tensors: list[torch.Tensor], slots: list[int]) -> dict[int, int]:
        """Map the storage of every tensor; return the address of each tensor's first element."""
        written = {slot for index, slot in enumerate(slots) if ROLES[index % len(ROLES)] not in READ}
        bases: dict[int, int] = {}
        places = {}
        for slot, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in bases:
                size = storage.nbytes()
                raw = (
                    np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
                    if size
                    else np.empty(0, np.uint8)
                )
                shared = [i for i, other in enumerate(tensors) if other.untyped_storage().data_ptr() == start]
                writable = any(i in written for i in shared)
                bases[start] = self._memory.map(f"tensor {slot}", raw, writable=writable, offset=start % 4096)
            places[slot] = bases[start] + tensor.data_ptr() - start
        return places

    def _job(self, tensors: list[torch.Tensor], slots: list[int], parameters: list[int]) -> ctypes.Structure:
        source = tensors[slots[0]]
        scale = tensors[slots[1]] if slots[1] >= 0 else None
        target, rounding, layout, fnuz, through, rows, cols = parameters
        return Job(
            element=VALUES[ELEMENTS[source.dtype]],
            scale_type=VALUES[SCALES[scale.dtype] if scale is not None else "kScaleF32"],
            encoded=scale is not None,
            through=through if scale is not None else VALUES[ELEMENTS[source.dtype]],
            target=target,
            rounding=rounding,
            layout=layout,
            fnuz=bool(fnuz),
            amax_rows=rows,
            amax_cols=cols,
        )

    def _fill(
        self,
        item: ctypes.Structure,
        given: dict[str, tuple[torch.Tensor, int]],
        geometry: list[int],
        job: ctypes.Structure,
    ) -> None:
        """Describe one weight as ops.cpp does."""
        source = given["source"][0]
        item.e = source.shape[0] if source.dim() == 3 else 1
        item.n = source.shape[-2]
        item.k = source.shape[-1] * (2 if job.element == VALUES["kE2m1"] else 1)
        if job.encoded:
            item.block_rows, item.block_cols, item.offset_rows, item.offset_cols = geometry
        numbers = {"source_second", "second"} | ({"amax"} if job.target == VALUES["kNvfp4"] else set())
        for role, (tensor, address) in given.items():
            if role in {"bad", "sums"}:
                setattr(item, role, address)
                continue
            view = getattr(item, role)
            view.data = address
            stride = tensor.stride()
            if role in numbers:
                view.stride_e = stride[0] if tensor.dim() == 1 else 0
            else:
                view.stride_e = stride[0] if tensor.dim() == 3 else 0
                view.stride_n, view.stride_k = stride[-2], stride[-1]
        if "scale" in given:
            item.scale_n, item.scale_k = given["scale"][0].shape[-2:]

    def _launched(self, name: bytes, blocks: int, threads: int, arguments: int) -> int:
        """Interpret one launch; called by the host library."""
        try:
            kernel = name.decode()
            self.launched[kernel] += 1
            program = self._program(kernel)
            program.run(self._memory, blocks, threads, ctypes.string_at(arguments, program.kernel.argument_bytes))
        except BaseException as error:  # noqa: BLE001 - ctypes would swallow it; convert() raises it
            self._error = error
            return 1
        return 0

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            kernel = kernel_of(self.variant, name)
            if self._edit is not None:
                kernel = replace(kernel, instructions=tuple(map(self._edit, kernel.instructions)))
            self._programs[name] = Program(kernel, self.options, lazy=True)
        return self._programs[name]
