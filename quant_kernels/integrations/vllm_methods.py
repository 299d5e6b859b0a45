"""vLLM's per-module methods: weights are created on meta, converted when they are complete, and multiplied as codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from quant_kernels import QuantizedTensor, dequantize, linear
from quant_kernels.integrations.vllm_checkpoint import create_experts, create_linear
from quant_kernels.loading.placement import STYLE_ATTRIBUTE
from quant_spec import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
    from vllm.model_executor.layers.linear import LinearBase

    from quant_kernels.integrations.engine import EngineQuantizer
    from quant_kernels.integrations.vllm_checkpoint import Block
    from quant_spec import QuantKey

_GATES: Final[dict[str, Callable[[Tensor], Tensor]]] = {"silu": functional.silu, "gelu": functional.gelu}


class KeptLinear(UnquantizedLinearMethod):
    """A Linear that the request leaves as it is."""

    def __init__(self, quantizer: EngineQuantizer, name: str) -> None:
        """Take the model's quantizer and the module's name."""
        super().__init__()
        self._quantizer = quantizer
        self._name = name

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Create the weight as vLLM does."""
        _say_style(layer, input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Let the quantizer know, then do what vLLM does."""
        self._quantizer.convert(self._name)
        super().process_weights_after_loading(layer)


class ConvertedLinear(LinearMethodBase):
    """A Linear whose weight is converted when it is complete, or whose FP8 codes are used as they were stored."""

    def __init__(self, quantizer: EngineQuantizer, name: str, source: Block | None = None) -> None:
        """Take the model's quantizer, the module's name, and the blocks of its FP8 codes in the checkpoint, if any."""
        self.uses_meta_device = source is None
        self._source = source
        self._quantizer = quantizer
        self._name = name
        self._weight: QuantizedTensor | None = None
        self._activation: QuantKey | None = None

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Create the weight in the checkpoint's dtype, on meta; vLLM gives it memory while it is loaded."""
        _say_style(layer, input_size_per_partition, output_partition_sizes, input_size, output_size)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        loader = extra_weight_attrs.pop("weight_loader", None)
        if self._source is not None:
            create_linear(self._name, layer, output_partition_sizes, input_size_per_partition, self._source, loader)
            return
        values = torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta", dtype=params_dtype)
        weight = ModelWeightParameter(data=values, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Convert the weight; a second call does nothing."""
        said = layer.quant_config
        if self._quantizer.convert(self._name):
            layer.quant_config = said  # vLLM's own attribute of this name
            self._weight = self._quantizer.weights(self._name)["weight"]
        elif self._source is not None and self._weight is None:
            self._weight = self._quantizer.stored(self._name)["weight"]
        self._activation = self._quantizer.format_of(self._name).activation_key

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · Wᵀ + bias."""
        if self._weight is None:
            return functional.linear(x, layer.weight, bias)
        return linear(x, self._weight, bias=bias, activation=self._activation)

    def dequantize_weight(self, layer: LinearBase) -> Tensor:
        """Return the weight [N, K] in the model's dtype."""
        if self._weight is None:
            return layer.weight.data
        return dequantize(self._weight, torch.bfloat16)


class KeptExperts(UnquantizedFusedMoEMethod):
    """Routed experts that the request leaves as they are."""

    def __init__(self, moe: FusedMoEConfig, quantizer: EngineQuantizer, name: str) -> None:
        """Take vLLM's description, the model's quantizer and the container's name."""
        super().__init__(moe)
        self._quantizer = quantizer
        self._name = name

    def create_weights(self, layer: RoutedExperts, *sizes: object, **more: object) -> None:
        """Create the stacks as vLLM does."""
        _say_expert_style(layer)
        super().create_weights(layer, *sizes, **more)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Let the quantizer know, then do what vLLM does."""
        self._quantizer.convert(self._name)
        super().process_weights_after_loading(layer)


class ConvertedExperts(FusedMoEMethodBase):
    """Routed experts whose stacks are converted when they are complete.

    Each expert that a token reached is one product; the experts' stacks are never decoded as a whole.
    """

    def __init__(self, moe: FusedMoEConfig, quantizer: EngineQuantizer, name: str, source: Block | None = None) -> None:
        """Take vLLM's description, the model's quantizer, the container's name, and the blocks of FP8 codes, if any."""
        super().__init__(moe)
        self.uses_meta_device = source is None
        self._source = source
        self._quantizer = quantizer
        self._name = name
        self._experts: dict[str, tuple[QuantizedTensor, ...]] = {}
        self._activation: QuantKey | None = None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Create the stacks w13 [E, 2I, H] and w2 [E, H, I] in the checkpoint's dtype, on meta."""
        _say_expert_style(layer)
        shapes = {
            "w13_weight": (num_experts, self.moe.w13_num_shards * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if self._source is not None:
            create_experts(self._name, layer, shapes, self._source, extra_weight_attrs)
            return
        for name, shape in shapes.items():
            values = torch.empty(shape, device="meta", dtype=params_dtype)
            stack = nn.Parameter(values, requires_grad=False)
            layer.register_parameter(name, stack)
            set_weight_attrs(stack, extra_weight_attrs)
        initialize_online_processing(layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return none: no kernel of vLLM reads these weights."""
        del layer

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Convert both stacks; a second call does nothing."""
        said = layer.quant_config
        if self._quantizer.convert(self._name):
            layer.quant_config = said  # vLLM's own attribute of this name
            self._experts = {name: _unstacked(stack) for name, stack in self._quantizer.weights(self._name).items()}
        elif self._source is not None and not self._experts:
            self._experts = {name: _unstacked(stack) for name, stack in self._quantizer.stored(self._name).items()}
        self._activation = self._quantizer.format_of(self._name).activation_key

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs, [tokens, H]; over ranks vLLM adds it up."""
        del shared_experts, shared_experts_input  # vLLM runs them beside this
        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        weights = topk_weights.to(x.dtype)
        result = torch.zeros_like(x)
        for expert in local.unique().tolist():
            if expert < 0:
                continue
            token, slot = torch.nonzero(local == expert, as_tuple=True)
            scale = weights[token, slot].unsqueeze(-1)
            values = x[token] * scale if layer.apply_router_weight_on_input else x[token]
            hidden = self._product(layer, "w13_weight", expert, values)
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self._product(layer, "w2_weight", expert, _GATES[layer.activation.value](gate) * up)
            result.index_add_(0, token, hidden if layer.apply_router_weight_on_input else hidden * scale)
        return result

    def _product(self, layer: RoutedExperts, name: str, expert: int, x: Tensor) -> Tensor:
        experts = self._experts.get(name)
        if experts is None:
            return functional.linear(x, getattr(layer, name)[expert])
        return linear(x, experts[expert], activation=self._activation)


def check_experts(layer: RoutedExperts, name: str) -> None:
    """Refuse experts that `ConvertedExperts` cannot run.

    Raises:
        PlanError: they have biases, another activation than a plain gated one, or a bound on it.
    """
    activation = layer.activation.value
    problem = ""
    if activation not in _GATES:
        problem = f"activation {activation!r}; allowed: {', '.join(_GATES)}"
    elif layer.moe_config.has_bias:
        problem = "biases of experts; allowed: none"
    elif layer.swiglu_limit is not None:
        problem = f"swiglu_limit {layer.swiglu_limit}; allowed: none"
    if problem:
        message = f"{name}: routed experts with {problem}; exclude them in the request"
        raise PlanError(message)


def _unstacked(stack: QuantizedTensor) -> tuple[QuantizedTensor, ...]:
    """Return the experts of a stack, as views."""
    second = stack.second_scale
    return tuple(
        QuantizedTensor(
            stack.data[expert],
            stack.scale[expert],
            stack.key,
            stack.shape[1:],
            None if second is None else second[expert],
        )
        for expert in range(stack.shape[0])
    )


def _say_style(layer: LinearBase, own_in: int, own_out: list[int], whole_in: int, whole_out: int) -> None:
    """Say how a Linear is cut over the ranks, as its sizes tell."""
    style = "row" if own_in != whole_in else "column" if sum(own_out) != whole_out else "replicated"
    setattr(layer, STYLE_ATTRIBUTE, style)


def _say_expert_style(layer: RoutedExperts) -> None:
    parallel = layer.moe_config.moe_parallel_config
    style = "expert" if parallel.use_ep else "tensor" if parallel.tp_size > 1 else "replicated"
    setattr(layer, STYLE_ATTRIBUTE, style)
