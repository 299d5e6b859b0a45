"""How far the weights of one checkpoint are from those of another: SQNR, largest error and cosine of each layer.

Either may be quantized or not, in any format and naming that is read. Rows are read from both a few at a time: memory
does not grow with the models.

SQNR = 10 log₁₀(Σ a² / Σ (a − b)²), where a is the first checkpoint; cosine = Σ ab / √(Σ a² Σ b²). Sums are fp64.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from math import lcm
from typing import TYPE_CHECKING, Final

import attrs
import torch

from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.storage import ELEMENT_WORDS
from quant_kernels.loading.stored_weights import StoredWeight, StoredWeights, WeightReader, is_matrix
from quant_kernels.loading.transfer import SourceFiles
from quant_spec import LoadError
from quant_spec.layer_config import word

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from quant_kernels.loading.shards import Progress

PIECE_BYTES: Final = 1 << 20
"""Bytes of fp32 values that are compared at a time: they stay in the processor's cache."""
_DB: Final = 10.0


@attrs.frozen
class LayerComparison:
    """One layer in both checkpoints.

    Attributes:
        layer: its name; for routed experts that of their container.
        left: its format in the first: a key's word, or the element type.
        right: its format in the second.
        elements: values that were compared.
        sqnr_db: signal to noise ratio; None where there is no error at all, or no signal.
        max_error: largest |a − b|; None if a value is NaN or Inf in one of them.
        cosine: of the two as vectors; None if one is all zeros.
        identical: every value is the same, bit for bit.
    """

    layer: str
    left: str
    right: str
    elements: int
    sqnr_db: float | None
    max_error: float | None
    cosine: float | None
    identical: bool

    def to_dict(self) -> dict[str, object]:
        """Return the entry of a JSON document."""
        return attrs.asdict(self)


@attrs.frozen
class Comparison:
    """Two checkpoints.

    Attributes:
        left: the first folder.
        right: the second.
        layers: layers that both have, those with the lowest SQNR first, identical ones last.
        only_left: tensors that the second lacks.
        only_right: tensors that the first lacks.
        skipped: tensor -> why its values were not compared.
        sqnr_db: of all values together; None as for a layer.
    """

    left: str
    right: str
    layers: tuple[LayerComparison, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    skipped: dict[str, str]
    sqnr_db: float | None

    @property
    def identical(self) -> bool:
        """Both hold the same values under the same names, as far as they could be read."""
        return not (self.only_left or self.only_right or self.skipped) and all(each.identical for each in self.layers)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document."""
        return {
            "left": self.left,
            "right": self.right,
            "identical": self.identical,
            "sqnr_db": self.sqnr_db,
            "layers": [each.to_dict() for each in self.layers],
            "only_left": list(self.only_left),
            "only_right": list(self.only_right),
            "skipped": dict(self.skipped),
        }


class _Sums:
    """Σ a², Σ b², Σ ab, Σ (a − b)², the largest |a − b|, and whether anything differs."""

    def __init__(self) -> None:
        self.left = self.right = self.product = self.noise = self.largest = 0.0
        self.elements = 0
        self.identical = True

    def add(self, left: Tensor, right: Tensor) -> None:
        difference = (left - right).flatten().double()
        a, b = left.flatten().double(), right.flatten().double()
        self.left += float(a.dot(a))
        self.right += float(b.dot(b))
        self.product += float(a.dot(b))
        self.noise += float(difference.dot(difference))
        largest = float(difference.abs().max())
        # A NaN stays: it is larger than any error.
        self.largest = largest if math.isnan(largest) else max(self.largest, largest)
        self.elements += left.numel()
        self.identical = self.identical and torch.equal(left.view(torch.int32), right.view(torch.int32))

    def join(self, other: _Sums) -> None:
        self.left += other.left
        self.right += other.right
        self.product += other.product
        self.noise += other.noise
        self.elements += other.elements

    @property
    def sqnr_db(self) -> float | None:
        ratio = self.left / self.noise if self.noise > 0 else 0.0
        return _DB * math.log10(ratio) if 0 < ratio < math.inf else None

    @property
    def cosine(self) -> float | None:
        length = math.sqrt(self.left) * math.sqrt(self.right)
        return self.product / length if length > 0 and math.isfinite(length) else None


def compare_checkpoints(left: Path, right: Path, *, progress: Progress | None = None) -> Comparison:
    """Compare the values of two checkpoints, tensor by tensor.

    Args:
        left: the first checkpoint folder; its values are the signal.
        right: the second.
        progress: told of every tensor, in elements.

    Raises:
        LoadError, ConfigError: one of them is damaged; a weight has different sizes in them; they share no weight.
    """
    first, second = (StoredWeights(open_folder(path)) for path in (left, right))
    common = [name for name in first.weights if name in second.weights]
    if not common:
        message = (
            f"{left} and {right} have no tensor in common; the first has {_some(first)}, the second {_some(second)}"
        )
        raise LoadError(message)
    for name in common:
        a, b = first.weights[name], second.weights[name]
        if a.shape != b.shape:
            message = f"{name}: {list(a.shape)} in {left}, {list(b.shape)} in {right}: different models"
            raise LoadError(message)
    if progress is not None:
        progress.start(sum(first.weights[name].width * _rows(first.weights[name]) for name in common))
    layers: dict[str, tuple[_Sums, StoredWeight, StoredWeight]] = {}
    with _one_thread(), SourceFiles(first.folder.path) as left_files, SourceFiles(second.folder.path) as right_files:
        readers = WeightReader(left_files), WeightReader(right_files)
        for name in common:
            a, b = first.weights[name], second.weights[name]
            sums, *_ = layers.setdefault(a.layer if is_matrix(a) else name, (_Sums(), a, b))
            for pair in _pieces(readers, a, b):
                sums.add(*pair)
            if progress is not None:
                progress.advance(a.width * _rows(a), name)
    total = _Sums()
    for sums, *_ in layers.values():
        total.join(sums)
    return Comparison(
        str(left),
        str(right),
        tuple(sorted((_entry(layer, *parts) for layer, parts in layers.items()), key=_order)),
        tuple(name for name in first.weights if name not in second.weights),
        tuple(name for name in second.weights if name not in first.weights),
        first.skipped | second.skipped,
        total.sqnr_db,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: pieces are too small to be shared, and threads that wait burn processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pieces(
    readers: tuple[WeightReader, WeightReader], left: StoredWeight, right: StoredWeight
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same rows of both, fp32."""
    if 0 in left.shape:
        return
    # A stack counts as one matrix where it is unquantized, and as many where it is not.
    shaped = left if left.key is not None else right
    grain = lcm(left.grain, right.grain)
    step = max(grain, PIECE_BYTES // (4 * left.width) // grain * grain)
    for matrix in range(shaped.matrices):
        for row in range(0, shaped.height, step):
            count = min(step, shaped.height - row)
            yield (
                _read(readers[0], left, shaped, matrix, row, count),
                _read(readers[1], right, shaped, matrix, row, count),
            )


def _read(
    reader: WeightReader, weight: StoredWeight, shaped: StoredWeight, matrix: int, row: int, count: int
) -> Tensor:
    if weight.key is None:
        return reader.rows(weight, 0, matrix * shaped.height + row, count)
    return reader.rows(weight, matrix, row, count)


def _rows(weight: StoredWeight) -> int:
    return weight.matrices * weight.height


def _entry(layer: str, sums: _Sums, left: StoredWeight, right: StoredWeight) -> LayerComparison:
    return LayerComparison(
        layer,
        _word(left),
        _word(right),
        sums.elements,
        sums.sqnr_db,
        sums.largest if math.isfinite(sums.largest) else None,
        sums.cosine,
        sums.identical,
    )


def _word(weight: StoredWeight) -> str:
    dtype = weight.data.dtype
    return ELEMENT_WORDS.get(dtype, dtype.lower()) if weight.key is None else word(weight.key)


def _order(each: LayerComparison) -> tuple[bool, float, str]:
    """Identical layers last; before them the lowest ratio first, and first of all what has none."""
    return each.identical, -math.inf if each.sqnr_db is None else each.sqnr_db, each.layer


def _some(found: StoredWeights) -> str:
    names = list(found.weights)
    return f"{', '.join(names[:2])}, …" if names else "none that can be read"
