"""The few names of vLLM that the plug-in imports, with their documented signatures, for tests without vLLM.

The real thing is tested by `make test-vllm`, which has no GPU; this lets the same hooks be played on one.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    import pytest

VERSION: Final = "0.32.0"


class QuantizeMethodBase:
    """Base of methods."""

    uses_meta_device = False


class QuantizationConfig:
    """Base of configs."""

    online_quantization_config = None

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class Layer(nn.Module):
    """A module as vLLM builds it: it asks for its method, and remembers the config."""

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        super().__init__()
        self.quant_config = config


class LinearBase(Layer):
    """Any Linear."""


class ParallelLMHead(Layer):
    """The output head."""


class RoutedExperts(Layer):
    """Routed experts."""

    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input = False
    swiglu_limit = None

    def __init__(self, config: QuantizationConfig | None = None, activation: str = "silu") -> None:
        super().__init__(config)
        self.activation = SimpleNamespace(value=activation)
        parallel = SimpleNamespace(use_ep=False, tp_size=1)
        self.moe_config = SimpleNamespace(has_bias=False, w13_num_shards=2, moe_parallel_config=parallel)


class LinearMethodBase(QuantizeMethodBase):
    """Base of Linear methods."""


class UnquantizedLinearMethod(LinearMethodBase):
    """vLLM's own."""

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *sizes, **extra) -> None:  # noqa: ANN001, ANN002, ANN003
        """Create the weight."""
        del sizes, extra
        values = torch.empty(sum(output_partition_sizes), input_size_per_partition, device="meta")
        layer.register_parameter("weight", nn.Parameter(values, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · Wᵀ + bias."""
        return functional.linear(x, layer.weight, bias)


class FusedMoEMethodBase(QuantizeMethodBase):
    """Base of experts' methods."""

    def __init__(self, moe: SimpleNamespace) -> None:
        self.moe = moe


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """vLLM's own."""

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *more, **extra) -> None:  # noqa: ANN001, ANN002, ANN003
        """Create the stacks."""
        del more, extra
        inner = intermediate_size_per_partition
        for name, shape in {
            "w13_weight": (num_experts, 2 * inner, hidden_size),
            "w2_weight": (num_experts, hidden_size, inner),
        }.items():
            layer.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing."""


class ModelWeightParameter(nn.Parameter):
    """A weight that knows its sides and its loader."""

    def __new__(cls, *, data: torch.Tensor, input_dim: int, output_dim: int, weight_loader: object) -> nn.Parameter:
        made = super().__new__(cls, data, requires_grad=False)
        made.input_dim, made.output_dim, made.weight_loader = input_dim, output_dim, weight_loader
        return made


def install(monkeypatch: pytest.MonkeyPatch, *, hf_overrides: object = None, version: str = VERSION) -> dict[str, type]:
    """Put the names where the plug-in imports them from; return the methods that it registers, by name."""
    registered: dict[str, type] = {}
    methods: list[str] = []

    def register(name: str) -> object:
        methods.append(name)
        return lambda cls: registered.setdefault(name, cls)

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_overrides=hf_overrides))
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, object]] = {
        "vllm.config": {"get_current_vllm_config": lambda: vllm_config},
        "vllm.config.quantization": {"QUANT_KEY_NAMES": {"mxfp4": "key of mxfp4", "mxfp8": "key of mxfp8"}},
        "vllm.distributed": {"get_tp_group": lambda: SimpleNamespace(world_size=1)},
        "vllm.version": {"__version__": version},
        f"{layers}.fused_moe": {"RoutedExperts": RoutedExperts},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{layers}.fused_moe.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}.quantization": {"register_quantization_config": register, "QUANTIZATION_METHODS": methods},
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        "vllm.model_executor.model_loader.reload.layerwise": {"initialize_online_processing": lambda layer: None},  # noqa: ARG005
        "vllm.model_executor.parameter": {
            "BlockQuantScaleParameter": ModelWeightParameter,
            "ModelWeightParameter": ModelWeightParameter,
        },
        "vllm.model_executor.utils": {
            "set_weight_attrs": lambda weight, attributes: weight.__dict__.update(attributes),
        },
    }
    for name in [*sys.modules]:
        if name.startswith("quant_kernels.integrations.vllm"):
            monkeypatch.delitem(sys.modules, name)
    for name, values in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in sys.modules or not getattr(sys.modules[path], "is_fake", False):
                module = ModuleType(path)
                module.is_fake = True
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(values)
    return registered
