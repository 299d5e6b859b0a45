"""Permutations of a Llama-like model that leave its function as it is, and its blocks of 32 weights not.

The channels of the residual stream, of every MLP, and of the values within every head may be renumbered at will: the
function is the same, but other weights share a scale. What holds for one numbering alone is chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def permute(model: PreTrainedModel, seed: int | None) -> None:
    """Renumber a model's channels in place; None: leave it as it is."""
    if seed is None:
        return
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    stream = torch.randperm(config.hidden_size, generator=generator)
    base = model.model
    _columns(base.embed_tokens.weight, stream)
    _rows(base.norm.weight, stream)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _columns(linear.weight, stream)
        for linear in (attention.o_proj, mlp.down_proj):
            _rows(linear.weight, stream)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _rows(norm.weight, stream)
        inner = torch.randperm(config.intermediate_size, generator=generator)
        _rows(mlp.gate_proj.weight, inner)
        _rows(mlp.up_proj.weight, inner)
        _columns(mlp.down_proj.weight, inner)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = attention.v_proj.weight.shape[0] // groups
        for group in range(groups):
            within = torch.randperm(size, generator=generator)
            _rows(attention.v_proj.weight[group * size : (group + 1) * size], within)
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                _columns(attention.o_proj.weight[:, head * size : (head + 1) * size], within)


def _rows(weight: torch.Tensor, order: torch.Tensor) -> None:
    weight.copy_(weight[order].clone())


def _columns(weight: torch.Tensor, order: torch.Tensor) -> None:
    weight.copy_(weight[:, order].clone())
