"""Rows: which rows of a weight a rank holds, and which rows of a block-scaled source's scales they use."""

from __future__ import annotations

import attrs

from quant_spec.arguments import check_count, check_instance, check_weight_shape
from quant_spec.decision import ModuleInfo
from quant_spec.errors import PlanError


@attrs.frozen
class RowRange:
    """Rows of one shard on one rank; both ranges hold their first and last row.

    Attributes:
        rows: within the shard's whole weight.
        scale_rows: in the source's scales, counted through all shards of the fused weight.
    """

    rows: tuple[int, int]
    scale_rows: tuple[int, int]


def shard_rows(module: ModuleInfo, *, block_rows: int, tp: int = 1, rank: int = 0, shard: int = 0) -> RowRange:
    """Return the rows of one shard that a rank holds, and the scale rows that they overlap.

    A shard narrower than a block shares its scale row with its neighbours; a fused weight has ceil(rows / block) scale
    rows for each of its shards.

    Raises:
        PlanError: the shape is unknown, there is no such shard or rank, or the rows cannot be cut evenly.
        ArgumentError: an argument is something else.
    """
    check_instance("module", module, ModuleInfo)
    for name, value, least in (("block_rows", block_rows, 1), ("tp", tp, 1), ("rank", rank, -1), ("shard", shard, -1)):
        check_count(name, value, least=least)
    shapes = module.shard_shapes or ((module.shape,) if module.shape else ())
    if not 0 <= shard < len(shapes) or not 0 <= rank < tp:
        message = f"no shard {shard} of {len(shapes)} on rank {rank} of {tp}"
        raise PlanError(message)
    check_weight_shape(shapes[shard])
    rows = shapes[shard][-2]
    ranks = tp if module.parallel == "column" else 1
    if rows % ranks:
        message = f"{rows} rows cannot be cut evenly over {ranks} ranks"
        raise PlanError(message)
    share = rows // ranks
    first = share * (rank if ranks > 1 else 0)
    last = first + share - 1
    before = sum(-(-shape[-2] // block_rows) for shape in shapes[:shard])
    return RowRange((first, last), (before + first // block_rows, before + last // block_rows))
