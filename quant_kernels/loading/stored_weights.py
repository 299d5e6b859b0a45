"""The weights of a checkpoint as values, some rows at a time, whatever format and naming they are stored in."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import attrs
import torch

from quant_kernels.checks import KernelInputError
from quant_kernels.conversion import dequantize
from quant_kernels.loading.headers import DTYPE_BITS, StoredTensor
from quant_kernels.loading.inventory import FLOAT_DTYPES, find_modules
from quant_kernels.loading.source import source_config
from quant_kernels.loading.storage import CONVENTIONS
from quant_kernels.loading.transfer import TORCH_DTYPES, SourceFiles, as_divisor, tensor_view
from quant_kernels.quantized import QuantizedTensor
from quant_spec import LoadError, QuantKey
from quant_spec.granularity import PerBlock, PerTensor

if TYPE_CHECKING:
    from torch import Tensor

    from quant_kernels.loading.folder import CheckpointFolder

_SCALES: Final = ("_scale_inv", "_scale")
_SECONDS: Final = tuple((each.second_suffix, each.second_is_divisor) for each in CONVENTIONS.values())
_MATRIX: Final = 2


@attrs.frozen
class StoredWeight:
    """A tensor of floating-point values as a checkpoint stores it.

    Attributes:
        name: what it is called without the marks of a format: `X.weight` for `X.weight_packed` too.
        layer: the module that it belongs to; for routed experts their container.
        data: its codes or values.
        shape: its sizes, in elements.
        key: its format; None: unquantized.
        scale: its scales; None: it has none.
        second: the second scale of a two-stage format, or None.
        second_is_divisor: `second` is the reciprocal.
    """

    name: str
    layer: str
    data: StoredTensor
    shape: tuple[int, ...]
    key: QuantKey | None = None
    scale: StoredTensor | None = None
    second: StoredTensor | None = None
    second_is_divisor: bool = False

    @property
    def matrices(self) -> int:
        """Matrices in a stack; 1 for a 2-D weight; all sides but the last of other tensors are rows of one matrix."""
        return prod(self.shape[:-2]) if self.key is not None else 1

    @property
    def height(self) -> int:
        """Rows of one matrix."""
        if self.key is not None:
            return self.shape[-2]
        return prod(self.shape[:-1])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def grain(self) -> int:
        """Rows that share a row of scales."""
        granularity = None if self.key is None else self.key.scale.granularity
        return granularity.rows if isinstance(granularity, PerBlock) else 1


class StoredWeights:
    """The weights of one checkpoint.

    Attributes:
        folder: the checkpoint.
        weights: by name, in the order of the files.
        skipped: name -> why its values cannot be read.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        """Find the weights, their formats and their scales.

        Raises:
            LoadError, ConfigError: the checkpoint's config is refused, or a quantized weight has no format or no scale.
        """
        self.folder = folder
        self.weights: dict[str, StoredWeight] = {}
        self.skipped: dict[str, str] = {}
        config = source_config(folder)
        modules = find_modules(folder.tensors.values())
        layers = {weight.name: module.name for module in modules.values() for weight in module.weights}
        names = {name: name.removesuffix("_packed").removesuffix(".weight") for name in layers}
        keys = config.resolve_many(names.values())
        taken: set[str] = set()
        for name, layer in layers.items():
            tensor = folder.tensors[name]
            key = None if tensor.dtype in FLOAT_DTYPES else keys[names[name]].weight_key
            found = self._quantized(tensor, layer, key) if tensor.dtype not in FLOAT_DTYPES else _plain(tensor, layer)
            if found is not None:
                self.weights[found.name] = found
                taken |= {part.name for part in (found.data, found.scale, found.second) if part is not None}
        for tensor in folder.tensors.values():
            if tensor.name not in taken and tensor.name not in layers and tensor.dtype in FLOAT_DTYPES:
                self.weights[tensor.name] = _plain(tensor, tensor.name)

    def _quantized(self, tensor: StoredTensor, layer: str, key: QuantKey | None) -> StoredWeight | None:
        if tensor.dtype not in TORCH_DTYPES or key is None:
            self.skipped[tensor.name] = f"{tensor.dtype} values" + ("" if key is None else f" in {key}")
            return None
        stem = tensor.name.removesuffix("_packed")
        tensors = self.folder.tensors
        scale = next((tensors[stem + suffix] for suffix in _SCALES if stem + suffix in tensors), None)
        if scale is None:
            message = f"{self.folder.path}: {tensor.name}: stored as {key}, but its scales are missing ({stem}_scale)"
            raise LoadError(message)
        second, is_divisor = None, False
        if key.second_scale is not None:
            present = [pair for pair in _SECONDS if stem + pair[0] in tensors]
            if len(present) != 1:
                wanted = " or ".join(stem + suffix for suffix, _ in _SECONDS)
                message = f"{self.folder.path}: {tensor.name}: stored as {key}: one of {wanted} is needed"
                raise LoadError(message)
            second, is_divisor = tensors[stem + present[0][0]], present[0][1]
        shape = (*tensor.shape[:-1], tensor.shape[-1] * (key.element.per_byte if tensor.dtype == "U8" else 1))
        return StoredWeight(stem, layer, tensor, shape, key, scale, second, is_divisor)


def _plain(tensor: StoredTensor, layer: str) -> StoredWeight:
    return StoredWeight(tensor.name, layer, tensor, tensor.shape)


class WeightReader:
    """Reads values of the weights of one checkpoint; keeps the scales of the last one."""

    def __init__(self, files: SourceFiles) -> None:
        """Take the open files of the checkpoint."""
        self._files = files
        self._scales: tuple[str, Tensor, Tensor | None] | None = None

    def rows(self, weight: StoredWeight, matrix: int, first: int, count: int) -> Tensor:
        """Return some rows of a matrix of a weight, dequantized, fp32 [count, K].

        Args:
            weight: the weight.
            matrix: index in its stack.
            first: first row; a multiple of `weight.grain`.
            count: rows.

        Raises:
            LoadError: the file cannot be read, or the scales do not fit.
        """
        data = weight.data
        row_bytes = weight.width * DTYPE_BITS[data.dtype] // 8
        if weight.key is not None:
            row_bytes = data.shape[-1] * DTYPE_BITS[data.dtype] // 8
        memory = memoryview(bytearray(count * row_bytes))
        self._files.read_into(memory, data.file, data.start + (matrix * weight.height + first) * row_bytes)
        dtype = TORCH_DTYPES[data.dtype]
        if weight.key is None:
            return tensor_view(memory, dtype, (count, weight.width)).float()
        if dtype is torch.uint8:
            dtype = weight.key.element.torch_dtype
        codes = tensor_view(memory, dtype, (count, data.shape[-1]))
        scale, second = self._scales_of(weight)
        part = _scale_rows(scale, weight, matrix, first, count)
        outer = None if second is None else second.reshape(-1)[matrix if second.numel() > 1 else 0]
        try:
            shape = (count, weight.width)
            return dequantize(QuantizedTensor(codes, part, weight.key, shape, outer), torch.float32)
        except KernelInputError as error:
            message = f"{data.file}: {data.name}: stored as {weight.key}: {error}"
            raise LoadError(message) from error

    def _scales_of(self, weight: StoredWeight) -> tuple[Tensor, Tensor | None]:
        if self._scales is None or self._scales[0] != weight.data.name:
            assert weight.scale is not None  # noqa: S101  (a quantized weight has scales)
            scale = self._files.read(weight.scale)
            scale = scale.float() if scale.dtype in {torch.bfloat16, torch.float16} else scale
            second = None if weight.second is None else self._files.read(weight.second).float()
            if second is not None and weight.second_is_divisor:
                second = as_divisor(second)
            self._scales = (weight.data.name, scale, second)
        return self._scales[1:]


def _scale_rows(scale: Tensor, weight: StoredWeight, matrix: int, first: int, count: int) -> Tensor:
    """Return the scales of some rows: 0-d for one scale a matrix, else [rows or rows of blocks, scales a row]."""
    assert weight.key is not None  # noqa: S101  (only quantized weights have scales)
    if isinstance(weight.key.scale.granularity, PerTensor):
        return scale.reshape(-1)[matrix if scale.numel() > 1 else 0]
    rows = -(-weight.height // weight.grain)
    if not scale.numel() or scale.numel() % (weight.matrices * rows):
        shape = list(scale.shape)
        message = f"{weight.data.file}: {weight.data.name} {list(weight.shape)}: {shape} scales do not fit {weight.key}"
        raise LoadError(message)
    of_matrix = scale.reshape(weight.matrices, rows, -1)[matrix]
    return of_matrix[first // weight.grain : -(-(first + count) // weight.grain)]


def is_matrix(weight: StoredWeight) -> bool:
    """Tell whether a tensor is a weight that could be quantized, or is."""
    return weight.key is not None or len(weight.shape) >= _MATRIX
