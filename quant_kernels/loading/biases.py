"""Biases: a rank's piece of the bias of a weight that is cut over the ranks, when the whole bias arrives.

A bias follows the output side of its weight: cut where that is cut, each projection of a fused one by itself, and whole
where the input side is cut. Biases of stacked experts, [E, N], follow the experts too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from quant_kernels.loading.parallel import ShardPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from quant_kernels.loading.decisions import LayerPlan
    from quant_kernels.loading.modules import WeightSlot


@attrs.frozen
class BiasCut:
    """What this rank holds of a bias.

    Attributes:
        place: where its weight lies in the whole.
        shards: projections that lie one after the other in the weight.
        experts: global indices of this rank's experts of a stack; None: it holds all of them.
        whole_experts: experts over all ranks.
    """

    place: ShardPlace
    shards: int = 1
    experts: tuple[int, ...] | None = None
    whole_experts: int = 0

    def local(self, bias: Tensor, shard: int | None) -> Tensor:
        """Return this rank's piece of a bias [.., N]; one that is no whole is returned as it is.

        Args:
            bias: of the whole weight, or of one of its projections.
            shard: index of the projection; None: all of them.
        """
        if self.experts is not None and bias.dim() and bias.shape[0] == self.whole_experts != len(self.experts):
            bias = bias[torch.tensor(self.experts)]
        if not bias.dim():
            return bias
        if shard is not None:
            return self._of_projection(bias, shard)
        fused = self.place.fused_rows
        if self.shards == 1 or not fused:
            return self._cut(bias, self.place.sizes)
        if bias.shape[-1] != sum(fused):
            return bias
        wholes = [sum(fused[each :: self.shards]) for each in range(self.shards)]
        parts = bias.split(wholes, dim=-1)
        return torch.cat([self._of_projection(part, each) for each, part in enumerate(parts)], dim=-1)

    def _of_projection(self, bias: Tensor, shard: int) -> Tensor:
        return self._cut(bias, self.place.fused_rows[shard :: self.shards])

    def _cut(self, bias: Tensor, sizes: tuple[int, ...]) -> Tensor:
        if bias.shape[-1] != sum(sizes):
            return bias
        return bias.narrow(-1, sum(sizes[: self.place.rank]), sizes[self.place.rank])


def bias_cuts(plans: Iterable[LayerPlan]) -> dict[str, BiasCut]:
    """Return parameter name -> what this rank holds of it, for the biases of weights that are spread over ranks."""
    return dict(pair for plan in plans if plan.placement is not None for pair in _of_layer(plan))


def _of_layer(plan: LayerPlan) -> Iterator[tuple[str, BiasCut]]:
    placement, view = plan.placement, plan.view
    if placement is None or not placement.is_spread:
        return
    for slot, place in zip(view.slots, placement.places, strict=True):
        shards = 1 if slot.interleaved else max(1, len(slot.shards))
        if placement.style == "expert":
            if slot.role != "weight":
                yield bias_name(slot), BiasCut(place, shards, view.expert_ids, len(placement.experts))
        elif place.is_cut and place.parallel == "column":
            yield bias_name(slot), BiasCut(place, shards)


def bias_name(slot: WeightSlot) -> str:
    """Return what the bias of a weight is called: `bias` beside `weight`, `X_bias` beside `X` or `X_weight`."""
    stem = slot.attribute.removesuffix("weight")
    leaf = f"{stem}bias" if stem != slot.attribute else f"{stem}_bias"
    return f"{slot.owner_name}.{leaf}" if slot.owner_name else leaf
