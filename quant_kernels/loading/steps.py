"""The steps of a job, one a stored tensor: copy it, convert it, or drop it because its values went into another."""

from __future__ import annotations

from math import lcm, prod
from typing import TYPE_CHECKING

import attrs

from quant_kernels.loading.headers import DTYPE_BITS, StoredTensor
from quant_kernels.loading.storage import StoredPart, rows_per_step
from quant_spec import QuantFormat, QuantKey
from quant_spec.granularity import PerBlock

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.frozen
class CopyStep:
    """A tensor whose bytes are copied.

    Attributes:
        tensor: the tensor in the source.
        name: its name in the output.
    """

    tensor: StoredTensor
    name: str

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """The one tensor that is written."""
        return (StoredPart(self.name, self.tensor.dtype, self.tensor.shape),)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the source."""
        return self.tensor.nbytes


@attrs.frozen
class WeightStep:
    """A weight that is converted.

    Attributes:
        layer: the module that it belongs to.
        weight: its codes or values in the source.
        shape: its shape [.., N, K] in elements.
        target: format that it is converted to.
        parts: tensors that are written: codes, scale, and the second scale of two-stage formats.
        source_key: format in the source; None: unquantized.
        source_scale: scales in the source; None: unquantized.
        second_is_divisor: the second scale is written as its reciprocal.
    """

    layer: str
    weight: StoredTensor
    shape: tuple[int, ...]
    target: QuantFormat
    parts: tuple[StoredPart, ...]
    source_key: QuantKey | None = None
    source_scale: StoredTensor | None = None
    second_is_divisor: bool = False

    @property
    def matrices(self) -> int:
        """Matrices in a stack; 1 for a 2-D weight."""
        return prod(self.shape[:-2])

    @property
    def source_rows_per_scale(self) -> int:
        """Rows that share a row of source scales; 1 where every row has its own, or none has."""
        granularity = None if self.source_key is None else self.source_key.scale.granularity
        return granularity.rows if isinstance(granularity, PerBlock) else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales in the source."""
        return self.weight.nbytes + (0 if self.source_scale is None else self.source_scale.nbytes)

    def pieces(self, step_bytes: int) -> Iterator[Piece]:
        """Yield the pieces in which the weight is converted, in the order of its data.

        Args:
            step_bytes: bytes of source in a piece, as far as blocks and whole-matrix scales allow.
        """
        height = self.shape[-2]
        grain = rows_per_step(self.target)
        if grain is None:
            rows = height
        else:
            grain = lcm(grain, self.source_rows_per_scale)
            row_bytes = self.weight.shape[-1] * DTYPE_BITS[self.weight.dtype] // 8
            rows = max(grain, step_bytes // max(1, row_bytes) // grain * grain)
        if 0 in self.shape:
            return
        for matrix in range(self.matrices):
            for first in range(0, height, max(1, rows)):
                yield Piece(matrix, first, min(rows, height - first), height)

    def rows_before(self, index: int, piece: Piece) -> int:
        """Return how many rows of the matrix stored as part `index` stand before those of `piece`."""
        if index == 0:
            return piece.first
        granularity = self.target.weight.scale.granularity
        return piece.first // (granularity.rows if isinstance(granularity, PerBlock) else 1)

    def offset_of(self, index: int, piece: Piece) -> int:
        """Return where the bytes of `piece` start within part `index`."""
        part = self.parts[index]
        matrix_nbytes = prod(part.shape) * DTYPE_BITS[part.dtype] // 8 // max(1, self.matrices)
        if piece.first == 0:
            return piece.matrix * matrix_nbytes
        part_rows = part.shape[len(self.shape) - 2]
        return piece.matrix * matrix_nbytes + self.rows_before(index, piece) * (matrix_nbytes // part_rows)


@attrs.frozen
class Piece:
    """Some rows of one matrix of a weight [.., N, K].

    Attributes:
        matrix: index of the matrix in a stack; 0 for a 2-D weight.
        first: first row within the matrix.
        rows: number of rows.
        height: rows of the whole matrix.
    """

    matrix: int
    first: int
    rows: int
    height: int

    @property
    def first_of_all(self) -> int:
        """First row, counted through the stack."""
        return self.matrix * self.height + self.first
