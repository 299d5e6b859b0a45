"""Bytes from source files through the kernels into the files of a new checkpoint, a bounded piece at a time.

A weight is read, converted and written in steps of some rows, so that memory does not grow with its size: rows, groups
and blocks do not depend on each other. Only formats with one scale a matrix need a whole matrix at once.
"""

from __future__ import annotations

import os
import threading
import time
from math import prod
from typing import TYPE_CHECKING, Final

import attrs
import torch

from quant_kernels.checks import NonFiniteError
from quant_kernels.conversion import quantize, requantize
from quant_kernels.loading.headers import DTYPE_BITS
from quant_kernels.loading.within import Stamp
from quant_kernels.quantized import QuantizedTensor
from quant_kernels.targets import TARGETS
from quant_spec.errors import LoadError
from quant_spec.granularity import PerTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from quant_kernels.loading.headers import StoredTensor
    from quant_kernels.loading.sinks import Sink
    from quant_kernels.loading.steps import Piece, WeightStep

STEP_BYTES: Final = 8 << 20
"""Bytes of source that are read, converted and written at a time: they stay in the processor's cache."""

_LISTED_ROWS: Final = 5
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Scratch:
    """Memory that is used again for every step; grows to the largest."""

    def __init__(self) -> None:
        """Start empty."""
        self._memory = bytearray()

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory, contents undefined. What was returned before must no longer be used."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return memoryview(self._memory)[:nbytes]


def tensor_view(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor on `memory`."""
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class SourceFiles:
    """Open files of the source checkpoint; bytes are read, not mapped: they count as no memory in use.

    Threads may share it.
    """

    def __init__(self, folder: Path, stamps: Mapping[str, Stamp] | None = None) -> None:
        """Take the checkpoint folder; files open when first read.

        Args:
            folder: the checkpoint folder.
            stamps: what the files were when their headers were read: a file that has changed since is refused.
        """
        self._folder = folder
        self._stamps = stamps or {}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read_into(self, memory: memoryview, file: str, offset: int) -> None:
        """Fill `memory` from `file`, starting at byte `offset`.

        Raises:
            LoadError: the file ends before, or cannot be read.
        """
        try:
            with self._lock:
                descriptor = self._descriptors.get(file)
                if descriptor is None:
                    descriptor = self._descriptors[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                    self._check(file, descriptor)
            while memory.nbytes:
                count = os.preadv(descriptor, [memory], offset)
                if not count:
                    message = f"{file}: the file ends at byte {offset}; it was changed while it was read"
                    raise LoadError(message)
                memory, offset = memory[count:], offset + count
        except OSError as error:
            message = f"{file}: cannot be read: {error.strerror or error}"
            raise LoadError(message) from error

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a small tensor (scales) whole."""
        memory = memoryview(bytearray(tensor.nbytes))
        self.read_into(memory, tensor.file, tensor.start)
        return tensor_view(memory, TORCH_DTYPES[tensor.dtype], tensor.shape)

    def check_unchanged(self) -> None:
        """Refuse what was read, if a file that is open has changed since its header was read.

        Raises:
            LoadError: one has, or another file has taken its place.
        """
        for file, descriptor in self._descriptors.items():
            try:
                self._check(file, descriptor)
                inode = (self._folder / file).stat().st_ino
            except OSError as error:
                message = f"{file}: it was removed while it was read: {error.strerror or error}"
                raise LoadError(message) from None
            if file in self._stamps and inode != self._stamps[file].inode:
                message = f"{file}: another file has taken its place while it was read"
                raise LoadError(message)

    def _check(self, file: str, descriptor: int) -> None:
        found, known = Stamp.of(descriptor), self._stamps.get(file)
        if known is None or found == known:
            return
        what = f"{known.size} bytes before, {found.size} now" if found.size != known.size else "it was written to"
        message = f"{file}: it was changed while it was read: {what}"
        raise LoadError(message)

    def close_except(self, files: frozenset[str]) -> None:
        """Close all files but those named."""
        for file in [each for each in self._descriptors if each not in files]:
            os.close(self._descriptors.pop(file))

    def __enter__(self) -> SourceFiles:  # noqa: PYI034  (typing.Self needs Python 3.11)
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files."""
        self.close_except(frozenset())


class StoppedError(Exception):
    """The job has ended: a step is given up between two pieces."""


@attrs.frozen
class Converted:
    """What converting one weight took and gave.

    Attributes:
        seconds: wall time, reading and writing included.
        signal: Σ w², if it was asked for.
        noise: Σ (w − ŵ)², likewise.
    """

    seconds: float
    signal: float = 0.0
    noise: float = 0.0


class Transfer:
    """Copies and converts tensors from the source files into one open file after the other; of one thread."""

    def __init__(
        self,
        source: SourceFiles,
        *,
        scale_rounding: str | None,
        through: torch.dtype,
        measure: bool,
        stopped: Callable[[], bool] = bool,
    ) -> None:
        """Take the source and the options of every conversion.

        Args:
            source: files to read.
            scale_rounding: of power-of-two scales; None: the format's default. Ignored by formats without such scales.
            through: dtype that a quantized source is rounded to on its way.
            measure: also sum up the error.
            stopped: asked before every piece; True gives the step up with StoppedError.
        """
        self._source = source
        self._rounding = scale_rounding
        self._through = through
        self._measure = measure
        self._stopped = stopped
        self._scratch = tuple(Scratch() for _ in range(4))

    def copy(self, tensor: StoredTensor, sink: Sink, offset: int) -> None:
        """Copy a tensor's bytes to byte `offset` of a file."""
        for begin in range(0, tensor.nbytes, STEP_BYTES):
            self._go_on()
            memory = self._scratch[0].take(min(STEP_BYTES, tensor.nbytes - begin))
            self._source.read_into(memory, tensor.file, tensor.start + begin)
            sink.write(memory, offset + begin)

    def _go_on(self) -> None:
        if self._stopped():
            raise StoppedError

    def convert(self, step: WeightStep, sink: Sink, offsets: Mapping[str, int]) -> Converted:
        """Convert a weight into a file.

        Args:
            step: the weight, what it becomes, and the tensors it is stored as.
            sink: what takes the bytes of that file.
            offsets: tensor name -> index of its first byte in that file.

        Raises:
            LoadError: the weight holds NaN or Inf (the message counts them and names the first rows), or a file failed.
        """
        started = time.perf_counter()
        scales = None if step.source_scale is None else self._source.read(step.source_scale)
        signal = noise = 0.0
        for piece in step.pieces(STEP_BYTES):
            self._go_on()
            try:
                result = self._convert_piece(step, piece, scales)
            except NonFiniteError as error:
                raise LoadError(self._bad_values(step, scales)) from error
            if result.error_sums is not None:
                signal += float(result.error_sums[0])
                noise += float(result.error_sums[1])
            self._write(step, piece, result, sink, offsets)
        return Converted(time.perf_counter() - started, signal, noise)

    def _convert_piece(self, step: WeightStep, piece: Piece, scales: Tensor | None) -> QuantizedTensor:
        name = step.weight.name
        codes = self._read_piece(step, piece)
        rounding = self._rounding if step.target.scale_roundings else None
        out = self._outputs(step, piece) if step.target.name in TARGETS else None
        if scales is None:
            return quantize(
                codes,
                step.target,
                scale_rounding=rounding,
                check=True,
                out=out,
                measure=self._measure and out is not None,
                name=name,
            )
        assert step.source_key is not None  # noqa: S101  (a weight with scales has a format)
        return requantize(
            codes,
            scales_of(scales, step, piece),
            source=step.source_key,
            target=step.target,
            through=self._through,
            scale_rounding=rounding,
            check=True,
            out=out,
            measure=self._measure and out is not None,
            name=name,
        )

    def _read_piece(self, step: WeightStep, piece: Piece) -> Tensor:
        weight = step.weight
        row_bytes = weight.shape[-1] * DTYPE_BITS[weight.dtype] // 8
        memory = self._scratch[0].take(piece.rows * row_bytes)
        self._source.read_into(memory, weight.file, weight.start + piece.first_of_all * row_bytes)
        dtype = TORCH_DTYPES[weight.dtype]
        if step.source_key is not None and dtype is torch.uint8:
            dtype = step.source_key.element.torch_dtype
        return tensor_view(memory, dtype, (piece.rows, weight.shape[-1]))

    def _outputs(self, step: WeightStep, piece: Piece) -> QuantizedTensor:
        """Return tensors on scratch memory that a conversion of `piece` writes into."""
        target = TARGETS[step.target.name]
        shape = (piece.rows, step.shape[-1])
        data_shape, scale_shape = target.data_shape(shape), target.scale_shape(shape)
        data = tensor_view(
            self._scratch[1].take(prod(data_shape) * target.data_dtype.itemsize), target.data_dtype, data_shape
        )
        scale = tensor_view(
            self._scratch[2].take(prod(scale_shape) * target.scale_dtype.itemsize), target.scale_dtype, scale_shape
        )
        second = None
        if step.target.weight.second_scale is not None:
            second = tensor_view(self._scratch[3].take(4), torch.float32, ())
        return QuantizedTensor(data, scale, step.target.weight, shape, second)

    def _write(
        self, step: WeightStep, piece: Piece, result: QuantizedTensor, sink: Sink, offsets: Mapping[str, int]
    ) -> None:
        tensors = [result.data, result.scale]
        if result.second_scale is not None:
            second = result.second_scale
            tensors.append(as_divisor(second) if step.second_is_divisor else second)
        for index, (part, tensor) in enumerate(zip(step.parts, tensors, strict=True)):
            scratch = self._scratch[1 + index]
            whole = scratch.take(tensor.nbytes)
            view = tensor_view(whole, torch.uint8, (tensor.nbytes,))
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            if flat.data_ptr() != view.data_ptr():
                view.copy_(flat)
            sink.write(whole, offsets[part.name] + step.offset_of(index, piece))

    def _bad_values(self, step: WeightStep, scales: Tensor | None) -> str:
        """Read a weight again, count its NaN and Inf and name the first rows that hold any."""
        nans = infs = 0
        rows: list[int] = []
        for piece in step.pieces(STEP_BYTES):
            values = self._read_piece(step, piece)
            numbers = values.float()
            if scales is not None:
                finite = scales_of(scales, step, piece).float().isfinite().all()
                numbers = numbers * torch.where(finite, 1.0, float("nan"))
            nans += int(numbers.isnan().sum())
            infs += int(numbers.isinf().sum())
            if len(rows) < _LISTED_ROWS:
                bad = (~numbers.isfinite()).any(-1).nonzero().flatten()
                rows += [piece.first_of_all + int(row) for row in bad[: _LISTED_ROWS - len(rows)]]
        counts = " and ".join(f"{count} {kind}" for count, kind in ((nans, "NaN"), (infs, "Inf")) if count)
        listed = ", ".join(map(str, rows))
        where = f"{step.weight.file}: tensor {step.weight.name!r} {list(step.weight.shape)}"
        return f"{where} holds {counts or 'a bad scale'}; first bad rows: {listed or 'unknown'}; nothing was quantized"


def as_divisor(second: Tensor) -> Tensor:
    """Return a second scale (fp32) as the number that scales are divided by: 1 / s2, rounded once; 1 for a zero one.

    Dividing by it differs from multiplying with s2 by at most an ulp of the fp32 product's.
    """
    largest = torch.finfo(torch.float32).max
    return torch.where(second == 0, torch.ones_like(second), second.reciprocal().clamp_max(largest))


def scales_of(scales: Tensor, step: WeightStep, piece: Piece) -> Tensor:
    """Return the source scales that the rows of `piece` use.

    Args:
        scales: all scales of the weight, as stored.
        step: the weight.
        piece: some of its rows.

    Returns:
        fp32 or E8M0: 0-d for one scale a matrix, else [rows or rows of blocks, scales a row].
    """
    assert step.source_key is not None  # noqa: S101  (a weight with scales has a format)
    if scales.dtype in {torch.bfloat16, torch.float16}:
        scales = scales.float()
    granularity = step.source_key.scale.granularity
    if isinstance(granularity, PerTensor):
        return scales.reshape(-1)[piece.matrix if scales.numel() > 1 else 0]
    block = step.source_rows_per_scale
    matrix = scales.reshape(step.matrices, -(-piece.height // block), -1)[piece.matrix]
    return matrix[piece.first // block : -(-(piece.first + piece.rows) // block)]
