"""Pending layers: the tensors of a layer as they arrive, cut to this rank's piece, until none is missing."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor

from quant_kernels.checks import dtype_name
from quant_kernels.loading.buffers import SlotBuffers
from quant_kernels.loading.cuts import Window, cut_scale, cut_weight, packed_per_byte
from quant_kernels.loading.install import mark_turned, put_buffer, put_weight
from quant_kernels.loading.layer import SlotWork
from quant_kernels.loading.parallel import ShardPlace
from quant_kernels.loading.sources import PLAIN_DTYPES, Part, StoredScales, encoded_parts, is_plain
from quant_kernels.loading.weights import WeightWork
from quant_spec import LoadError, QuantKey
from quant_spec.granularity import Granularity, PerBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quant_kernels.loading.arrivals import Address
    from quant_kernels.loading.decisions import LayerPlan
    from quant_kernels.loading.modules import WeightSlot

_STACK: Final = 3
_LISTED: Final = 5
Cell = tuple[int, int | None, int | None]


@attrs.define(eq=False)
class Piece:
    """The tensors of one projection, one expert, or a whole weight.

    Attributes:
        name: of the weight in the checkpoint.
        weight, scale, second: the tensors, cut to this rank's piece.
        offset: row and column of the first element within the first block of scales.
        suffix: what the scales are called after the weight's name.
    """

    name: str
    weight: Tensor | None = None
    scale: Tensor | None = None
    second: Tensor | None = None
    offset: tuple[int, int] = (0, 0)
    suffix: str = "_scale"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in (self.weight, self.scale, self.second) if each is not None)


class PendingLayer:
    """One layer that is not complete yet. Not thread-safe: the caller holds a lock."""

    def __init__(self, plan: LayerPlan) -> None:
        """Take a layer; nothing has arrived."""
        self.plan = plan
        self.pieces: dict[Cell, Piece] = {}
        self.inputs: dict[str, Tensor] = {}
        self.buffers = SlotBuffers()
        self._covered: dict[tuple[int, int, int], str] = {}
        self._cells = sum(_experts(slot) * _shards(slot) for slot in plan.view.slots)

    @property
    def key(self) -> QuantKey | None:
        """Format of quantized weights in the checkpoint."""
        return self.plan.decision.source.weight_key

    @property
    def _granularity(self) -> Granularity | None:
        return self.key.scale.granularity if self.key else None

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(piece.nbytes for piece in self.pieces.values())

    def cut(self, name: str, address: Address, tensor: Tensor) -> Tensor:
        """Return this rank's piece of a tensor, in memory of its own if it is not all of it.

        Raises:
            LoadError: its shape is neither the whole's nor the piece's.
        """
        slot = self.plan.view.slots[address.slot]
        if address.content in ("second", "input_scale"):
            return self._local_experts(tensor, slot, address)
        tensor = self._local_experts(tensor, slot, address)
        window = self._window(address, slot)
        if address.content == "weight":
            lead = (slot.shape[0],) if len(slot.shape) == _STACK and address.expert is None else ()
            return cut_weight(name, tensor, window, lead=lead, most_rows=slot.shape[-2])
        return cut_scale(name, tensor, window, self._granularity)

    def split(self, address: Address, tensor: Tensor) -> Iterator[tuple[Address, Tensor]]:
        """Yield the projections of a whole fused tensor whose output side is cut; any other tensor as it is.

        Each projection is cut over the ranks by itself. A stack [expert, input, output] comes out as a view
        [expert, output, input]; one expert's matrix, and codes, are [.., output, input] wherever they come from.
        """
        slot = self.plan.view.slots[address.slot]
        place = self._place(address.slot)
        count = 1 if slot.interleaved else _shards(slot)
        if address.content == "weight" and address.expert is None:
            if slot.transposed and tensor.dim() == _STACK and is_plain(tensor):
                tensor = tensor.transpose(-1, -2)
            elif tensor.dim() == _STACK + 1:
                tensor = tensor.flatten(-2)  # codes in blocks of one scale: [E, N, K / 32, 16]
        whole = place.is_cut and place.parallel == "column" and count > 1 and address.shard is None
        if not whole or address.content not in ("weight", "scale") or not self._has_whole_rows(address, tensor, place):
            yield address, tensor
            return
        sizes = [sum(place.fused_rows[shard::count]) for shard in range(count)]
        if address.content == "scale":
            sizes = self._scale_rows(sizes, tensor)
        for shard in range(count):
            if tensor.dim() == len(slot.shape) - (address.expert is not None):
                part = tensor.narrow(-2, sum(sizes[:shard]), sizes[shard])
            else:
                part = tensor.narrow(-1, sum(sizes[:shard]), sizes[shard])
            yield attrs.evolve(address, shard=shard), part

    def _has_whole_rows(self, address: Address, tensor: Tensor, place: ShardPlace) -> bool:
        if address.content == "weight":
            return tensor.dim() > 1 and tensor.shape[-2] == place.whole
        return tensor.numel() > 1

    def _scale_rows(self, sizes: list[int], scale: Tensor) -> list[int]:
        granularity = self._granularity
        if isinstance(granularity, PerBlock):
            return [-(-size // granularity.rows) for size in sizes]
        return [1] * len(sizes) if scale.shape[-1] == len(sizes) and scale.dim() < 2 else sizes  # noqa: PLR2004

    def add(self, name: str, address: Address, tensor: Tensor) -> None:
        """Take a tensor that `cut` returned.

        Raises:
            LoadError: it, or another that covers the same rows, has arrived before.
        """
        if address.content == "input_scale":
            self.inputs[address.suffix] = tensor
            return
        cell = (address.slot, address.expert, address.shard)
        piece = self.pieces.setdefault(cell, Piece(name))
        if getattr(piece, address.content) is not None:
            raise LoadError(f"{name}: duplicate tensor: it has arrived before")
        if address.content == "weight":
            piece.name = name
            slot = self.plan.view.slots[address.slot]
            window = self._window(address, slot)
            for covered in self._cells_of(address):
                if covered in self._covered:
                    del self.pieces[cell]
                    message = f"{name}: duplicate tensor: {self._covered[covered]} holds the same rows"
                    raise LoadError(message)
                self._covered[covered] = name
            piece.offset = window.offset(self._granularity)
        elif address.content == "scale":
            piece.suffix = address.suffix
        setattr(piece, address.content, tensor)

    @property
    def is_complete(self) -> bool:
        """True if nothing is missing."""
        return len(self._covered) == self._cells and not any(True for _ in self._lacking())

    def missing(self) -> list[str]:
        """Return what is missing, by name as far as it can be told."""
        found = []
        for index, slot in enumerate(self.plan.view.slots):
            for expert, shard in itertools.product(range(_experts(slot)), range(_shards(slot))):
                if (index, expert, shard) not in self._covered:
                    found.append(self._name_of(slot, expert, shard))
        return [*found, *self._lacking()]

    def _lacking(self) -> Iterator[str]:
        """Yield the scales that quantized weights lack."""
        for piece in self.pieces.values():
            if piece.weight is None or is_plain(piece.weight):
                continue
            if piece.scale is None:
                yield f"{piece.name.removesuffix('_packed')}_scale"
            if piece.second is None and self.key is not None and self.key.second_scale is not None:
                yield f"{piece.name.removesuffix('_packed')}_scale_2"

    def _name_of(self, slot: WeightSlot, expert: int, shard: int) -> str:
        leaf = slot.shards[shard] if len(slot.shards) > 1 else ""
        if len(slot.shape) == _STACK:
            at = f"{slot.name}[expert {self.plan.view.expert_id(expert)}]"
            return f"{at}.{leaf}" if leaf else at
        parent = slot.owner_name.rpartition(".")[0]
        return f"{parent}.{leaf}.{slot.attribute}" if leaf else slot.name

    def _cells_of(self, address: Address) -> Iterator[tuple[int, int, int]]:
        slot = self.plan.view.slots[address.slot]
        experts = range(_experts(slot)) if address.expert is None else (address.expert,)
        shards = range(_shards(slot)) if address.shard is None else (address.shard,)
        return ((address.slot, expert, shard) for expert in experts for shard in shards)

    # -- this rank's piece ------------------------------------------------------------------------------------------

    def _place(self, slot: int) -> ShardPlace:
        return self.plan.placement.places[slot] if self.plan.placement else ShardPlace()

    def _local_experts(self, tensor: Tensor, slot: WeightSlot, address: Address) -> Tensor:
        """Return the local experts of a tensor that has all of them."""
        placement = self.plan.placement
        ids = self.plan.view.expert_ids
        whole = len(placement.experts) if placement else 0
        if ids is None or address.expert is not None or not tensor.dim() or tensor.shape[0] != whole != slot.shape[0]:
            return tensor
        local = torch.tensor(ids)
        turned = slot.transposed and tensor.dim() == _STACK
        return tensor.transpose(-1, -2)[local].transpose(-1, -2) if turned else tensor[local]

    def _window(self, address: Address, slot: WeightSlot) -> Window:
        """Return which rows and columns of the tensor at an address are this rank's."""
        place = self._place(address.slot)
        n, k = slot.shape[-2:]
        rows = self._shard_rows(slot)[address.shard] if address.shard is not None else n
        if not place.is_cut:
            return Window((rows, k), (0, rows), (0, k))
        if place.parallel == "row":
            return Window((rows, place.whole), (0, rows), (place.start, place.start + k))
        if address.shard is None:
            return Window((place.whole, k), (place.start, place.start + n), (0, k))
        count = _shards(slot)
        if rows < 0:
            message = (
                f"{slot.owner_name}: the rows of its projections {', '.join(slot.shards)} on each rank are not known;"
                " set its attribute output_partition_sizes"
            )
            raise LoadError(message)
        each = place.fused_rows[address.shard :: count] if place.fused_rows else [size // count for size in place.sizes]
        start = sum(each[: place.rank])
        return Window((sum(each), k), (start, start + rows), (0, k))

    def _shard_rows(self, slot: WeightSlot) -> tuple[int, ...]:
        """Return the local rows of each projection; -1: it is known when its tensor has arrived."""
        if slot.shard_rows is not None:
            return slot.shard_rows
        return (-1,) * max(1, len(slot.shards))

    # -- what becomes of it -----------------------------------------------------------------------------------------

    def works(self) -> list[SlotWork]:
        """Return the weights of a complete layer, ready to be converted.

        Raises:
            LoadError: the rows of projections do not add up, or scales do not fit.
        """
        found = []
        for index, slot in enumerate(self.plan.view.slots):
            pieces = {cell: piece for cell, piece in self.pieces.items() if cell[0] == index}
            starts = self._starts(index, slot)
            buffer = self.buffers.whole(index, [cell[1:] for cell in pieces])
            if buffer is not None:
                parts = [Part(buffer, slot.name)]
            else:
                parts = [part for cell, piece in pieces.items() for part in self._parts(slot, cell, piece, starts)]
            work = WeightWork(slot.name, slot.shape, tuple(parts))
            nbytes = sum(piece.nbytes for piece in pieces.values())
            found.append(SlotWork(slot, work, self._place(index), StoredScales(), nbytes, id(slot)))
        return found

    def _starts(self, index: int, slot: WeightSlot) -> tuple[int, ...]:
        """Return the first row of each projection, and the rows of all."""
        rows = list(self._shard_rows(slot))
        for (at, _, shard), piece in self.pieces.items():
            if at == index and shard is not None and piece.weight is not None and rows[shard] < 0:
                rows[shard] = piece.weight.shape[-2]
        if len(rows) > 1 and -1 not in rows and sum(rows) != slot.shape[-2]:
            message = (
                f"{slot.name}: its projections have {', '.join(map(str, rows))} rows, together not {slot.shape[-2]}"
            )
            raise LoadError(message)
        return (0, *itertools.accumulate(rows))

    def _parts(self, slot: WeightSlot, cell: Cell, piece: Piece, starts: tuple[int, ...]) -> Iterator[Part]:
        _, expert, shard = cell
        weight = piece.weight
        if weight is None:
            raise LoadError(f"{piece.name}: scales without a weight of the same rows")
        if shard is None:
            rows = slice(0, slot.shape[-2])
        elif slot.interleaved:
            rows = slice(shard, None, len(slot.shards))
        else:
            rows = slice(starts[shard], starts[shard + 1])
        if is_plain(weight):
            yield Part(weight, piece.name, expert, rows)
            return
        if self.key is None or piece.scale is None:
            message = (
                f"{piece.name}: arrives as {dtype_name(weight.dtype)}, but the checkpoint's config says unquantized"
            )
            raise LoadError(message)
        whole_rows = slot.shard_rows if shard is None and not slot.interleaved else None
        for part in encoded_parts(
            piece.name, weight, piece.scale, self.key, second=piece.second, shard_rows=whole_rows, offset=piece.offset
        ):
            first, past, _ = part.rows.indices(weight.shape[-2])
            inner = rows if slot.interleaved else slice(rows.start + first, rows.start + past)
            yield attrs.evolve(part, expert=expert, rows=inner)

    def materialize(self, device: torch.device) -> None:
        """Put the tensors of a complete layer into its modules as they are.

        Raises:
            LoadError: pieces of one weight are stored in several dtypes.
        """
        for index, slot in enumerate(self.plan.view.slots):
            pieces = {cell: piece for cell, piece in self.pieces.items() if cell[0] == index}
            starts = self._starts(index, slot)
            dtypes = {piece.weight.dtype for piece in pieces.values() if piece.weight is not None}
            if len(dtypes) != 1:
                message = f"{slot.name}: its parts arrive as {', '.join(sorted(map(dtype_name, dtypes)))}"
                raise LoadError(message)
            dtype = dtypes.pop()
            per_byte = packed_per_byte(torch.empty(0, dtype=dtype))
            stored = slot.tensor.dtype if dtype.is_floating_point and dtype.itemsize > 1 else dtype
            whole = _empty(slot, per_byte, stored, device)
            for (_, expert, shard), piece in pieces.items():
                rows = slice(None) if shard is None else slice(starts[shard], starts[shard + 1])
                if shard is not None and slot.interleaved:
                    rows = slice(shard, None, len(slot.shards))
                view = whole if expert is None else whole[expert]
                assert piece.weight is not None  # noqa: S101  (the layer is complete)
                view[..., rows, :].copy_(piece.weight)
            put_weight(slot, whole.transpose(-1, -2) if slot.transposed and is_plain(whole) else whole)
            if slot.transposed and not is_plain(whole):
                mark_turned(slot.owner)
            self._put_scales(slot, pieces, device)
            if slot.shard_rows is None and len(starts) > 2 and starts[-1] == slot.shape[-2]:  # noqa: PLR2004  (fused)
                slot.owner.logical_widths = [b - a for a, b in itertools.pairwise(starts)]  # type: ignore[assignment]
        for suffix, tensor in self.inputs.items():
            put_buffer(self.plan.view.slots[0].owner, suffix.rpartition(".")[2], tensor.to(device))

    def _put_scales(self, slot: WeightSlot, pieces: dict[Cell, Piece], device: torch.device) -> None:
        ordered = sorted(pieces.items(), key=lambda pair: (pair[0][1] or 0, pair[0][2] or 0))
        for content in ("scale", "second"):
            tensors: dict[int | None, list[Tensor]] = {}
            for (_, expert, _), piece in ordered:
                tensor = getattr(piece, content)
                if tensor is not None:
                    tensors.setdefault(expert, []).append(tensor)
            if not tensors:
                continue
            joined = [_joined(each) for each in tensors.values()]
            value = joined[0] if None in tensors else torch.stack(joined)
            suffix = ordered[0][1].suffix if content == "scale" else "_scale_2"
            put_buffer(slot.owner, slot.attribute + suffix, value.to(device, copy=True))
        offset = ordered[0][1].offset
        if any(offset):
            setattr(slot.owner, f"{slot.attribute}_block_offset", offset)


def _joined(scales: list[Tensor]) -> Tensor:
    """Return the scales of all projections as one tensor."""
    if len(scales) == 1:
        return scales[0]
    return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in scales])


def _empty(slot: WeightSlot, per_byte: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a weight as its module holds it, as [.., N, K / per_byte]."""
    shape = (*slot.shape[:-1], slot.shape[-1] // per_byte)
    if not slot.transposed or dtype not in PLAIN_DTYPES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device).transpose(-1, -2)


def _experts(slot: WeightSlot) -> int:
    return slot.shape[0] if len(slot.shape) == _STACK else 1


def _shards(slot: WeightSlot) -> int:
    return max(1, len(slot.shards))
