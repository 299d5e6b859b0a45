"""QuantizedLinear: y = x·Wᵀ + b with W held quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quant_kernels.nn.packed import PackedModule, PackedWeight
from quant_kernels.quantized_linear import linear

if TYPE_CHECKING:
    from quant_spec import QuantKey


class QuantizedLinear(PackedModule):
    """A linear layer whose weight is held as codes and scales; no full-precision copy of it is ever made.

    It is no `nn.Linear`: what expects one to hold a plain weight refuses it, rather than compute with codes.

    Attributes:
        in_features: K.
        out_features: N.
        activation: format that inputs are quantized to on the fly; None: they are not.
        bias: [N] or None.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight: QuantKey,
        *,
        activation: QuantKey | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate a layer; its values are set by whoever loads it.

        Args:
            in_features: K.
            out_features: N.
            weight: format of the weight.
            activation: format of inputs; None: as they come.
            bias: True for one.
            device: where.
            dtype: of the bias; None: torch's default.

        Raises:
            quant_spec.QuantSpecError: no kernel reads the weight's format.
        """
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.hold("weight", PackedWeight(weight, (out_features, in_features)), device)
        made = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + b: [.., K] -> [.., N], in x's dtype."""
        return linear(x, self.quantized("weight"), bias=self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        """Say shapes and formats."""
        sides = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sides}, weight={self.packed['weight'].key}, activation={self.activation}"
