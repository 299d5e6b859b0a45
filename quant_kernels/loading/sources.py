"""Sources: how a module holds a weight before it is converted, plain or quantized, in the form that kernels read.

Scales are looked for beside the weight, as `X_scale`, `X_scale_inv` (both multiply) and, for a weight called `weight`,
`weight_quantizer.scale`; NVFP4's scale of the scales as `X_scale_2`. Two spellings at once are an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import torch
from torch import Tensor

from quant_kernels.checks import KernelInputError, dtype_name
from quant_kernels.encodings import Encoded, encode_source
from quant_spec import LoadError, QuantKey
from quant_spec.granularity import PerBlock
from quant_spec.stored import INPUT_SCALE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from quant_kernels.loading.modules import WeightSlot

_WEIGHT_AND_BIAS: Final = 2
PLAIN_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of unquantized weights."""
SCALE_SUFFIXES: Final = ("_scale", "_scale_inv")
SECOND_SUFFIX: Final = "_scale_2"
QUANTIZER_SCALE: Final = "weight_quantizer.scale"

WeightSource: TypeAlias = Tensor | Encoded


@attrs.frozen(eq=False)
class Part:
    """Some rows of a weight, and where they lie in it.

    Attributes:
        source: their values, plain or quantized: [n, K], or [E, n, K] for all matrices of a stack.
        label: what errors call them.
        expert: index of the matrix in a stack; None: the weight is one matrix, or these are rows of all of them.
        rows: which rows of the matrix.
        cols: which columns.
    """

    source: WeightSource
    label: str
    expert: int | None = None
    rows: slice = slice(None)
    cols: slice = slice(None)


@attrs.frozen(eq=False)
class StoredScales:
    """The tensors beside a quantized weight.

    Attributes:
        scale: its scales.
        second: NVFP4's scale of the scales, or None.
        attributes: names below the owner, to be removed once the weight is converted.
    """

    scale: Tensor | None = None
    second: Tensor | None = None
    attributes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return sum(tensor.nbytes for tensor in (self.scale, self.second) if tensor is not None)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor holds an unquantized weight."""
    return tensor.dtype in PLAIN_DTYPES


def scale_names(attribute: str) -> tuple[str, ...]:
    """Return the spellings of the scales of the weight called `attribute`, relative to its owner."""
    quantizer = (QUANTIZER_SCALE,) if attribute == "weight" else ()
    return (*(attribute + suffix for suffix in SCALE_SUFFIXES), *quantizer)


def attribute_of(owner: nn.Module, path: str) -> Tensor | None:
    """Return the tensor at a dotted path below a module, or None."""
    found: object = owner
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch.Tensor) else None


def stored_scales(slot: WeightSlot) -> StoredScales:
    """Return what lies beside a weight.

    Raises:
        LoadError: two spellings of its scales are there at once.
    """
    owner = slot.owner
    if len(owner._parameters) + len(owner._buffers) + len(owner._modules) <= _WEIGHT_AND_BIAS:  # noqa: SLF001
        # Most modules hold a weight and a bias: there is nothing to look for.
        return StoredScales() if _has_no_more(owner, slot.attribute) else _stored_scales(slot)
    return _stored_scales(slot)


def _has_no_more(owner: nn.Module, attribute: str) -> bool:
    names = (*owner._parameters, *owner._buffers, *owner._modules)  # noqa: SLF001  (named_parameters takes long)
    return all(name in (attribute, "bias") for name in names)


def _stored_scales(slot: WeightSlot) -> StoredScales:
    owner = slot.owner
    found = {name: tensor for name in scale_names(slot.attribute) if (tensor := attribute_of(owner, name)) is not None}
    if len(found) > 1:
        listed = ", ".join(found)
        message = f"{slot.owner_name}: more than one weight scale: {listed}; a weight has one"
        raise LoadError(message)
    second_name = slot.attribute + SECOND_SUFFIX
    second = attribute_of(owner, second_name)
    inputs = tuple(name for name in INPUT_SCALE_NAMES if attribute_of(owner, name) is not None)
    seconds = (second_name,) if second is not None else ()
    return StoredScales(next(iter(found.values()), None), second, (*found, *seconds, *inputs))


def read_slot(slot: WeightSlot, key: QuantKey | None) -> tuple[Part, ...]:
    """Return the parts of a weight that a module holds.

    Args:
        slot: the weight.
        key: its format as the checkpoint's config says; not asked for a plain weight.

    Raises:
        LoadError: the weight is quantized and nothing says how, its scales are missing, or they do not fit.
    """
    tensor = slot.matrix.detach()
    if is_plain(tensor):
        return (Part(tensor, slot.name),)
    if key is None:
        message = (
            f"{slot.name}: stored as {dtype_name(tensor.dtype)}, but the checkpoint's config does not say that it is"
            " quantized; pass QuantizationConfig.from_online(request, source=...)"
        )
        raise LoadError(message)
    scales = stored_scales(slot)
    if scales.scale is None:
        wanted = " or ".join(scale_names(slot.attribute))
        message = f"{slot.name}: stored as {key}, but its scales are missing ({wanted})"
        raise LoadError(message)
    return encoded_parts(
        slot.name,
        tensor,
        scales.scale.detach(),
        key,
        second=None if scales.second is None else scales.second.detach(),
        shard_rows=None if slot.interleaved else slot.shard_rows,
        offset=block_offset(slot),
    )


def encoded_parts(
    name: str,
    data: Tensor,
    scale: Tensor,
    key: QuantKey,
    *,
    second: Tensor | None = None,
    shard_rows: Sequence[int] | None = None,
    offset: tuple[int, int] = (0, 0),
) -> tuple[Part, ...]:
    """Return a quantized weight as one part, or as one for each shard whose blocks start anew.

    Args:
        name: what errors call it.
        data: codes [.., N, K] (4-bit: [.., N, K/2]).
        scale: its scales.
        key: its format.
        second: NVFP4's scale of the scales.
        shard_rows: rows of each shard of a fused weight.
        offset: block scales: row and column of the first element within the first block.

    Raises:
        LoadError: dtypes or shapes do not fit the format.
    """
    block = key.scale.granularity
    try:
        if isinstance(block, PerBlock) and shard_rows and offset[0] == 0 and scale.dim() == data.dim():
            counts = [-(-rows // block.rows) for rows in shard_rows]
            if scale.shape[-2] == sum(counts) != -(-data.shape[-2] // block.rows):
                return _per_shard(name, data, scale, key, shard_rows, counts, offset)
        shards = shard_rows if scale.numel() > 1 and len(shard_rows or ()) > 1 else None
        encoded = encode_source(data, _shaped(scale, data), key, second_scale=second, offset=offset, shard_rows=shards)
    except KernelInputError as error:
        message = f"{name}: stored as {key}: {error}"
        raise LoadError(message) from error
    return (Part(encoded, name),)


def _per_shard(
    name: str,
    data: Tensor,
    scale: Tensor,
    key: QuantKey,
    shard_rows: Sequence[int],
    counts: Sequence[int],
    offset: tuple[int, int],
) -> tuple[Part, ...]:
    parts = []
    row = scale_row = 0
    for rows, count in zip(shard_rows, counts, strict=True):
        codes, scales = data[..., row : row + rows, :], scale[..., scale_row : scale_row + count, :]
        encoded = encode_source(codes, scales, key, offset=offset)
        parts.append(Part(encoded, name, rows=slice(row, row + rows)))
        row, scale_row = row + rows, scale_row + count
    return tuple(parts)


def _shaped(scale: Tensor, data: Tensor) -> Tensor:
    """Return scales without the shape [1] and [1, 1] of a single one, which stand for any number of sides."""
    return scale.reshape(()) if scale.numel() == 1 and scale.dim() != data.dim() else scale


def block_offset(slot: WeightSlot) -> tuple[int, int]:
    """Return where a rank's cut of a weight starts within its first block of scales.

    A module holds it as `X_block_offset`, beside the weight X, where it is not (0, 0).
    """
    said = getattr(slot.owner, f"{slot.attribute}_block_offset", (0, 0))
    row, col = said
    return int(row), int(col)
