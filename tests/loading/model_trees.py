"""Module trees of the models that the recipes are for, as transformers builds them, with true or small sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Sides = dict[str, int]
QWEN3_30B: Sides = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
QWEN3_235B: Sides = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
SMALL_QWEN3: Sides = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
R1: Sides = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
}
SMALL_R1: Sides = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 64,
}
BLOCK_FP8: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""How the checkpoint of DeepSeek-R1 is quantized."""
_STORED_PLAIN = ("embed_tokens", "norm", "lm_head", "gate.weight", "eh_proj", "shared_head", "correction_bias")


def meta(kind: str, config: object) -> nn.Module:
    """Return a model of transformers on meta."""
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind)(config).to(torch.bfloat16)
    return model


def qwen3(sides: Mapping[str, int]) -> nn.Module:
    """Return the tree of a Qwen3 mixture of experts on meta."""
    return meta("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**sides))


def deepseek(sides: Mapping[str, int], *, mtp: bool) -> nn.Module:
    """Return the tree of DeepSeek-R1 on meta; its multi-token prediction block is layer 61."""
    config = transformers.DeepseekV3Config(**{**R1, **sides})
    model = meta("DeepseekV3ForCausalLM", config)
    if mtp:
        with torch.device("meta"):
            model.model.layers.append(mtp_block(config).to(torch.bfloat16))
    return model


def mtp_block(config: transformers.DeepseekV3Config) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    block = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers)
    hidden = config.hidden_size
    block.enorm, block.hnorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
    block.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
    block.embed_tokens = nn.Embedding(config.vocab_size, hidden)
    block.shared_head = nn.ModuleDict(
        {"norm": nn.RMSNorm(hidden), "head": nn.Linear(hidden, config.vocab_size, bias=False)}
    )
    return block


def one_by_one(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yield name, shape and dtype of every tensor as a checkpoint holds them: one an expert's projection."""
    for name, tensor in model.state_dict().items():
        if tensor.dim() != 3:
            yield name, tuple(tensor.shape), tensor.dtype
            continue
        container, _, leaf = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        shape = tensor.shape[1] // len(leaves), tensor.shape[2]
        for expert in range(tensor.shape[0]):
            yield from ((f"{container}.{expert}.{each}.weight", shape, tensor.dtype) for each in leaves)


def as_held(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yield name, shape and dtype of every tensor as the model holds them: experts in stacks."""
    yield from ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items())


def block_fp8_tensors(model: nn.Module, seed: int = 0, *, stacked: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a block-FP8 checkpoint of a model, one an expert's projection, or experts in stacks."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape, dtype in as_held(model) if stacked else one_by_one(model):
        if any(part in name for part in _STORED_PLAIN) or len(shape) < 2:
            yield name, torch.ones(shape, dtype=dtype)
            continue
        yield name, torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        yield f"{name}_scale_inv", torch.rand(blocks, generator=generator) + 0.5


def bf16_tensors(model: nn.Module, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an unquantized checkpoint of a model, one an expert's projection."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape, dtype in one_by_one(model):
        yield name, torch.randn(shape, generator=generator).to(dtype)
