"""Model families: the module names that checkpoints and serving engines use, for any number of layers and experts."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.mapping import NameRules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_QKV: Final = ("qkv_proj", ("q_proj", "k_proj", "v_proj"))
_GATE_UP: Final = ("gate_up_proj", ("gate_proj", "up_proj"))
_MLA: Final = ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))
_ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_EXPERT: Final = ("gate_proj", "up_proj", "down_proj")


@attrs.frozen
class ModelFamily:
    """Module names of a family of models, in checkpoint spelling.

    Attributes:
        name: what people call it.
        layer_prefix: what stands before a layer's number.
        outside: modules outside the layers.
        layer: modules of every layer, below its number.
        first_layer: modules of the first layer in place of `later_layers` (a dense one before the experts begin).
        later_layers: modules of the other layers.
        experts: the expert container below a layer, or an empty string.
        expert_leaves: projections of one expert; empty if experts are stored stacked.
        packed: fused modules of serving engines -> their shards.
        prefix_mapping: renames from checkpoint to module spelling that engines use for this family.
    """

    name: str
    outside: tuple[str, ...]
    layer: tuple[str, ...]
    layer_prefix: str = "model.layers."
    first_layer: tuple[str, ...] = ()
    later_layers: tuple[str, ...] = ()
    experts: str = ""
    expert_leaves: tuple[str, ...] = ()
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    prefix_mapping: tuple[tuple[str, str], ...] = ()

    def checkpoint_names(self, layers: int = 2, experts: int = 2) -> tuple[str, ...]:
        """Return the names of the modules that hold weights, each expert by itself, in checkpoint spelling."""
        return tuple(self._names(layers, experts))

    def _names(self, layers: int, experts: int) -> Iterator[str]:
        for layer in range(layers):
            prefix = f"{self.layer_prefix}{layer}."
            special = self.first_layer if layer == 0 and self.first_layer else self.later_layers
            yield from (prefix + leaf for leaf in (*self.layer, *special))
            if self.experts and special is self.later_layers:
                for expert in range(experts):
                    yield from (f"{prefix}{self.experts}.{expert}.{leaf}" for leaf in self.expert_leaves)
        yield from self.outside

    def serving_names(self, layers: int = 2) -> tuple[str, ...]:
        """Return the names that a serving engine asks for: fused modules, expert containers, attention itself."""
        rules = self.rules()
        fused = {shard: whole for whole, shards in self.packed for shard in shards}
        found: dict[str, None] = {}
        for name in self.checkpoint_names(layers, experts=1):
            module = rules.to_module(name)
            head, experts, _ = module.partition(f"{self.experts}.0.") if self.experts else (module, "", "")
            if experts:
                found[f"{head}{self.experts}"] = None
                continue
            parent, dot, leaf = module.rpartition(".")
            found[f"{parent}{dot}{fused.get(leaf, leaf)}"] = None
            if leaf == "o_proj":
                found[f"{parent}.attn"] = None
        return tuple(found)

    def rules(self, experts: int | None = None) -> NameRules:
        """Return the name rules of an engine that serves this family."""
        return NameRules(
            name_mapping=self.prefix_mapping,
            packed_modules_mapping=self.packed,
            num_experts=experts if self.expert_leaves else None,
            expert_leaves=self.expert_leaves or _EXPERT,
        )


_OUTSIDE: Final = ("model.embed_tokens", "model.norm", "lm_head")
_FAMILIES: Final = (
    ModelFamily("Llama", _OUTSIDE, (*_ATTENTION, *_MLP, *_NORMS), packed=(_QKV, _GATE_UP)),
    ModelFamily(
        "Qwen3-MoE",
        _OUTSIDE,
        (*_ATTENTION, "mlp.gate", *_NORMS),
        experts="mlp.experts",
        expert_leaves=_EXPERT,
        packed=(_QKV,),
    ),
    ModelFamily(
        "DeepSeek-V3",
        (*_OUTSIDE, "model.layers.61.eh_proj", "model.layers.61.enorm", "model.layers.61.shared_head.head"),
        (
            *(f"self_attn.{leaf}" for leaf in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
            *_NORMS,
        ),
        first_layer=_MLP,
        later_layers=("mlp.gate", *(f"mlp.shared_experts.{leaf}" for leaf in _EXPERT)),
        experts="mlp.experts",
        expert_leaves=_EXPERT,
        packed=(_GATE_UP, _MLA),
    ),
    ModelFamily(
        "gpt-oss",
        _OUTSIDE,
        (*_ATTENTION, "mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", *_NORMS),
        packed=(_QKV,),
    ),
    ModelFamily(
        "Llama-4",
        (
            "language_model.lm_head",
            "multi_modal_projector.linear_1",
            "vision_model.model.layers.0.self_attn.q_proj",
            "vision_model.model.layers.0.mlp.fc1",
        ),
        (
            *_ATTENTION,
            "feed_forward.router",
            *(f"feed_forward.shared_expert.{leaf}" for leaf in _EXPERT),
            "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down_proj",
        ),
        layer_prefix="language_model.model.layers.",
        packed=(_QKV, _GATE_UP),
    ),
    ModelFamily(
        "Qwen2.5-VL",
        ("visual.blocks.0.attn.qkv", "visual.blocks.0.attn.proj", "visual.merger.mlp.0", "lm_head"),
        (*_ATTENTION, *_MLP, *_NORMS),
        layer_prefix="model.language_model.layers.",
        packed=(_QKV, _GATE_UP),
        prefix_mapping=(("model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    ),
)

MODEL_FAMILIES: Final[Mapping[str, ModelFamily]] = MappingProxyType({family.name: family for family in _FAMILIES})
"""Families by name: dense, with routed experts, with latent attention, with stacked experts, with images."""
