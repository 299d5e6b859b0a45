"""QuantizedExperts: routed experts whose stacked weights are held quantized.

The experts module of a model keeps its class's gate function, sizes and biases, and gets another forward pass: tokens
are sorted by expert, each expert in use is multiplied with its rows, and the results are summed up by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor, nn

from quant_kernels.nn.grouped import grouped_linear
from quant_kernels.nn.packed import PackedModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from quant_spec import QuantKey

UP_NAMES = ("gate_up_proj", "up_proj")
DOWN_NAME = "down_proj"


class QuantizedExperts(PackedModule):
    """Forward pass of stacked experts; mixed into the model's own class by `experts_class`.

    The class below it provides `num_experts`, and `_apply_gate` [.., 2·I] -> [.., I] (or `act_fn`, where experts have
    no gate).

    Attributes:
        activation: format that inputs of each product are quantized to; None: they are not.
    """

    activation: QuantKey | None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: [T, H].
            top_k_index: integers [T, k]: the experts of each token.
            top_k_weights: [T, k]: their weights.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        experts = int(cast("int", self.num_experts))
        ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
        wanted = torch.arange(experts, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ids, wanted, right=True)
        tokens = order // top_k_index.shape[-1]
        up = self._product(self._up_name(), hidden_states[tokens], offsets)
        down = self._product(DOWN_NAME, self._between(up), offsets)
        weighted = down * top_k_weights.reshape(-1)[order].to(down.dtype).unsqueeze(-1)
        # Written back in the tokens' own order, so that the sum does not depend on atomic additions.
        placed = torch.empty_like(weighted).index_copy(0, order, weighted)
        return placed.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)

    def _up_name(self) -> str:
        return next(name for name in UP_NAMES if name in self.packed)

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        bias = self._parameters.get(f"{name}_bias")
        return grouped_linear(x, offsets, self.quantized(name), bias=bias, activation=self.activation)

    def _between(self, up: Tensor) -> Tensor:
        gate = cast("Callable[[Tensor], Tensor]", self._apply_gate if self.has_gate else self.act_fn)
        return gate(up)


_made: Final[dict[type[nn.Module], type[QuantizedExperts]]] = {}


def experts_class(cls: type[nn.Module]) -> type[QuantizedExperts]:
    """Return a class of quantized experts that keeps everything of `cls` but its forward pass."""
    if cls not in _made:
        _made[cls] = type(f"Quantized{cls.__name__}", (QuantizedExperts, cls), {"__module__": __name__})
    return _made[cls]
