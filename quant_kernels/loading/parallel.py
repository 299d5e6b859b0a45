"""Tensor parallel: what ranks must agree on so that their shards equal those of the quantized whole weight.

Only scales that cover values of several ranks need an agreement: rows of a weight whose input side is cut (PTPC), whole
matrices (NVFP4), and blocks that a cut goes through. What is agreed on is the greatest magnitude, four bytes each, for
all weights of a layer in one collective. Groups of 32 (MXFP4, MXFP8) never span ranks: a cut inside one cannot be
stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs
import torch

from quant_kernels.checks import KernelInputError, NonFiniteError, check_choice
from quant_kernels.launch import run_amax, source_shape
from quant_kernels.loading.distributed import Ranks, as_ranks, together
from quant_kernels.loading.sources import Part
from quant_kernels.loading.weights import (
    BLOCK,
    ConversionOptions,
    WeightWork,
    convert_weights,
    dense_weight,
    matrix_amax,
)
from quant_kernels.targets import TARGETS, TargetCode
from quant_spec import LoadError, QuantFormat, get_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from quant_kernels.quantized import QuantizedTensor

Cut: TypeAlias = Literal["column", "row"]
CUTS: Final = ("column", "row")
"""Sides that a weight [N, K] is cut along: `column` the output side N, `row` the input side K."""
_MAGNITUDE_BITS: Final = 0x7FFFFFFF
_LISTED: Final = 5


@attrs.frozen
class ShardPlace:
    """Where a rank's shard lies in the whole weight.

    Attributes:
        parallel: the side that is cut; None: the rank holds the whole.
        rank: this rank.
        sizes: that side's size on each rank.
        fused_rows: for a fused weight whose projections are each cut by themselves, the rows of each on each rank.
    """

    parallel: Cut | None = None
    rank: int = 0
    sizes: tuple[int, ...] = (0,)
    fused_rows: tuple[int, ...] = ()

    @property
    def is_cut(self) -> bool:
        """True if other ranks hold parts of the weight."""
        return self.parallel is not None and len(self.sizes) > 1

    @property
    def start(self) -> int:
        """First element of the side that this rank holds."""
        return sum(self.sizes[: self.rank])

    @property
    def whole(self) -> int:
        """Size of the side over all ranks."""
        return sum(self.sizes)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the side is cut."""
        return tuple(sum(self.sizes[:rank]) for rank in range(1, len(self.sizes)))

    @property
    def block_offset(self) -> tuple[int, int]:
        """Row and column of the first element within the first block of `per_block_fp8`."""
        if not self.is_cut:
            return (0, 0)
        return (self.start % BLOCK, 0) if self.parallel == "column" else (0, self.start % BLOCK)

    def cut_blocks(self) -> tuple[int, ...]:
        """Return the blocks of 128 along the cut side that a cut goes through."""
        return tuple(sorted({bound // BLOCK for bound in self.bounds if bound % BLOCK}))

    def obstacle(self, target: QuantFormat) -> str:
        """Return why a weight cut like this cannot be stored in a format, or an empty text."""
        if not self.is_cut:
            return ""
        multiple = target.k_multiple
        if self.parallel == "row" and any(size % multiple for size in self.sizes):
            shares = sorted(set(self.sizes))
            share = f"{shares[0]} on each" if len(shares) == 1 else f"{', '.join(map(str, self.sizes))} on the ranks"
            return (
                f"input side of {self.whole}, {share} of {len(self.sizes)} ranks, is not a multiple of {multiple}"
                f" as {target.weight} needs"
            )
        blocks = target.name in TARGETS and TARGETS[target.name].code is TargetCode.PER_BLOCK_FP8
        if blocks and self.parallel == "column" and any(rows % BLOCK for rows in self.fused_rows):
            return (
                f"projections cut into {', '.join(map(str, dict.fromkeys(self.fused_rows)))} rows lie one after the"
                f" other, and cannot share blocks of {BLOCK} rows with other ranks"
            )
        return ""


def needs_agreement(target: QuantFormat, place: ShardPlace) -> bool:
    """Tell whether ranks must agree on magnitudes before they quantize shards that lie like this."""
    if not place.is_cut or target.name not in TARGETS:
        return False
    match TARGETS[target.name].code:
        case TargetCode.PTPC_FP8:
            return place.parallel == "row"
        case TargetCode.NVFP4:
            return True
        case TargetCode.PER_BLOCK_FP8:
            return bool(place.cut_blocks())
        case _:
            return False


def agree(
    ranks: Ranks,
    works: Sequence[tuple[WeightWork, ShardPlace]],
    target: QuantFormat,
    options: ConversionOptions,
    *,
    layer: str,
    failure: str | None = None,
) -> list[WeightWork]:
    """Return the weights of a layer with the magnitudes that all ranks agreed on: one collective, or none.

    Args:
        ranks: the group; all its ranks must call this for the same layers in the same order.
        works: the weights and where they lie.
        target: the format.
        options: of the conversion.
        layer: its name, for errors.
        failure: what this rank failed with before; then it only says so.

    Raises:
        LoadError: this or another rank failed, or one does not answer; no weight was changed.
        NonFiniteError: checked, and a weight holds NaN or Inf on some rank; raised on all ranks.
    """
    asked = [needs_agreement(target, place) for _, place in works]
    if not any(asked):
        return [_placed(work, place, target) for work, place in works]
    shared = [pair for pair, needed in zip(works, asked, strict=True) if needed]
    try:
        buffers = [_contribution(*pair, target, options, silent=failure is not None) for pair in shared]
    except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must learn of it)
        failure = f"{type(error).__name__}: {error}"
        buffers = [_contribution(*pair, target, options, silent=True) for pair in shared]
    # Magnitudes are not negative, so their bits order as integers do, NaN above Inf: nothing is lost in the maximum.
    status = torch.tensor([int(failure is not None)], dtype=torch.int32, device=buffers[0].device)
    flat = torch.cat([status, *(_bits(buffer) for buffer in buffers)])
    agreed = ranks.reduce_max(flat, f"{layer}: agreeing on magnitudes")
    if int(agreed[0]):
        _raise_together(ranks, layer, failure)
    found, at, index = [], 1, 0
    for (work, place), needed in zip(works, asked, strict=True):
        placed = _placed(work, place, target)
        if needed:
            count = buffers[index].numel()
            values = (agreed[at : at + count]).view(torch.float32).view(buffers[index].shape)
            placed = attrs.evolve(placed, amax=_own_amax(placed, place, target, options, values))
            if options.check:
                _check_finite(values, work, place, target)
            at, index = at + count, index + 1
        found.append(placed)
    return found


def _bits(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.int32) & _MAGNITUDE_BITS


def _raise_together(ranks: Ranks, layer: str, failure: str | None) -> None:
    said = ranks.gather(failure, f"{layer}: what failed")
    lines = [f"rank {rank} of {ranks.size}: {text}" for rank, text in enumerate(said) if text is not None]
    raise LoadError(f"{layer}: not quantized: " + "\n".join(lines))


def _placed(work: WeightWork, place: ShardPlace, target: QuantFormat) -> WeightWork:
    blocks = target.name in TARGETS and TARGETS[target.name].code is TargetCode.PER_BLOCK_FP8
    return attrs.evolve(work, offset=place.block_offset) if blocks and any(place.block_offset) else work


def _contribution(
    work: WeightWork, place: ShardPlace, target: QuantFormat, options: ConversionOptions, *, silent: bool
) -> Tensor:
    """Return this rank's magnitudes of what is shared: rows [.., N, 1], matrices [..], or cut blocks [.., cut, C]."""
    device = work.device
    lead, (n, _) = work.shape[:-2], work.shape[-2:]
    match TARGETS[target.name].code:
        case TargetCode.PTPC_FP8:
            return torch.zeros((*lead, n, 1), device=device) if silent else _row_amax(work, options)
        case TargetCode.NVFP4:
            return torch.zeros(lead, device=device) if silent else matrix_amax(work, options)
        case _:
            return _cut_block_amax(work, place, options, silent=silent)


def _row_amax(work: WeightWork, options: ConversionOptions) -> Tensor:
    found = torch.empty((*work.shape[:-1], 1), device=work.device)
    for part in work.parts:
        *lead, n, k = source_shape(part.source)
        own = torch.empty((*lead, n, 1), device=work.device)
        run_amax(part.source, own, (1, k), options.through)
        (found if part.expert is None else found[part.expert])[..., part.rows, :] = own
    return found


def _block_amax(work: WeightWork, place: ShardPlace, options: ConversionOptions) -> Tensor:
    """Return the magnitudes of all blocks that a shard overlaps: [.., R, C] from its own values alone."""
    (top, left), (n, k) = place.block_offset, work.shape[-2:]
    shifted = attrs.evolve(work, offset=place.block_offset)
    dense = dense_weight(work, options.through)
    found = torch.zeros((*work.shape[:-2], *shifted.tiles()), device=work.device)
    for r0, r1, row in ((0, min(n, BLOCK - top), 0), (min(n, BLOCK - top), n, 1)):
        for c0, c1, col in ((0, min(k, BLOCK - left), 0), (min(k, BLOCK - left), k, 1)):
            if r0 < r1 and c0 < c1:
                tiles = (-(-(r1 - r0) // BLOCK), -(-(c1 - c0) // BLOCK))
                own = torch.empty((*work.shape[:-2], *tiles), device=work.device)
                run_amax(dense[..., r0:r1, c0:c1], own, (BLOCK, BLOCK), options.through)
                found[..., row : row + tiles[0], col : col + tiles[1]] = own
    return found


def _cut_block_amax(work: WeightWork, place: ShardPlace, options: ConversionOptions, *, silent: bool) -> Tensor:
    """Return the magnitudes of the cut blocks, from this rank's values; the cut side first among the last two."""
    blocks = place.cut_blocks()
    shifted = attrs.evolve(work, offset=place.block_offset)
    rows, cols = shifted.tiles()
    across = cols if place.parallel == "column" else rows
    found = torch.zeros((*work.shape[:-2], len(blocks), across), device=work.device)
    if silent:
        return found
    own = _block_amax(work, place, options)
    own = own if place.parallel == "column" else own.transpose(-1, -2)
    first = place.start // BLOCK
    for index, block in enumerate(blocks):
        if 0 <= block - first < own.shape[-2]:
            found[..., index, :] = own[..., block - first, :]
    return found


def _own_amax(
    work: WeightWork, place: ShardPlace, target: QuantFormat, options: ConversionOptions, values: Tensor
) -> Tensor:
    """Return agreed magnitudes in the shape that the conversion takes."""
    if TARGETS[target.name].code is not TargetCode.PER_BLOCK_FP8:
        return values
    own = _block_amax(work, place, options)
    turned = own if place.parallel == "column" else own.transpose(-1, -2)
    first = place.start // BLOCK
    for index, block in enumerate(place.cut_blocks()):
        if 0 <= block - first < turned.shape[-2]:
            turned[..., block - first, :] = values[..., index, :]
    return own


def _check_finite(values: Tensor, work: WeightWork, place: ShardPlace, target: QuantFormat) -> None:
    """Raise on all ranks if a magnitude that they share is NaN or Inf; names rows of this rank's piece."""
    bad = (~values.reshape(values.shape or (1,)).isfinite()).nonzero()
    if not bad.numel():
        return
    n = work.shape[-2]
    code = TARGETS[target.name].code
    rows = []
    for index in bad[:_LISTED].tolist():
        matrix = index[0] if len(work.shape) > 2 else 0  # noqa: PLR2004  (a stack)
        row = 0
        if code is TargetCode.PTPC_FP8:
            row = index[-2]
        elif code is TargetCode.PER_BLOCK_FP8:
            block = place.cut_blocks()[index[-2]] * BLOCK - place.start
            row = min(max(block, 0), n - 1) if place.parallel == "column" else index[-1] * BLOCK
        rows.append(matrix * n + row)
    unit = {TargetCode.PTPC_FP8: "rows", TargetCode.NVFP4: "matrices"}.get(code, "cut blocks")
    raise NonFiniteError(work.name, rows, len(bad), f"{unit}, over all ranks,")


def quantize_shard(  # noqa: PLR0913  (as quantize, and where the shard lies)
    shard: Tensor,
    format: str | QuantFormat,  # noqa: A002  (the word of the documents)
    *,
    parallel: Cut,
    group: Ranks | dist.ProcessGroup | DeviceMesh,
    shards: int = 1,
    scale_rounding: str | None = None,
    check: bool = False,
    fnuz: bool = False,
    measure: bool = False,
    name: str = "w",
) -> QuantizedTensor:
    """Quantize this rank's shard of a weight so that it equals the shard of the quantized whole weight.

    All ranks of the group must call it, in the same order.

    Args:
        shard: float32, float16 or bfloat16 [n, K] or [E, n, K] (`column`), [N, k] or [E, N, k] (`row`).
        format: name of a registered format, or the format.
        parallel: `column` if the output side is cut over the ranks, `row` if the input side is.
        group: process group, one-dimensional device mesh, or ranks.
        shards: projections fused in the weight, each cut by itself (`column`).
        scale_rounding: as for `quantize`.
        check: as for `quantize`; raised on all ranks where they agree on magnitudes.
        fnuz: as for `quantize`.
        measure: as for `quantize`, over this shard.
        name: what errors call the weight.

    Returns:
        Codes of the shard and the scales that it overlaps. Where a cut goes through blocks of 128, the shard's first
        element lies `start % 128` into the first block: pass that as `offset=` to `dequantize`.

    Raises:
        KernelInputError: an argument does not fit, or the cut cannot be stored, with the sizes.
        LoadError: the ranks' shapes, dtypes or options disagree, or a rank does not answer.
        NonFiniteError: `check` found NaN or Inf.
    """
    check_choice("parallel", parallel, CUTS)
    target = get_format(format)
    ranks = as_ranks(group)
    side = -2 if parallel == "column" else -1
    others = [size for axis, size in enumerate(shard.shape) if axis != shard.dim() + side]
    said = (str(target.weight), parallel, scale_rounding, fnuz, check, shard.dtype, others, shard.shape[side])
    answers = together(ranks, f"{name}: comparing shapes", lambda: said)
    for rank, answer in enumerate(answers):
        if answer[:-1] != said[:-1]:
            message = f"{name}: rank {rank} has {_told(answer)}, rank {ranks.rank} has {_told(said)}"
            raise LoadError(message)
    sizes = tuple(int(answer[-1]) for answer in answers)
    fused = tuple(-(-size // shards) for size in sizes) if shards > 1 else ()
    place = ShardPlace(parallel, ranks.rank, sizes, fused)
    obstacle = place.obstacle(target)
    if obstacle:
        raise KernelInputError(name, obstacle, f"shards that are multiples of {target.k_multiple}")
    through = shard.dtype
    options = ConversionOptions(scale_rounding, check=check, measure=measure, fnuz=fnuz, through=through)
    work = WeightWork(name, tuple(shard.shape), (Part(shard, name),))
    agreed = agree(ranks, [(work, place)], target, options, layer=name)
    return convert_weights(agreed, target, options)[0]


def _told(said: tuple[object, ...]) -> str:
    words = ("format", "parallel", "scale_rounding", "fnuz", "check", "dtype", "other sides")
    return ", ".join(f"{word} {value}" for word, value in zip(words, said, strict=False))
