"""Tiny checkpoints with random weights and the true module trees of Llama, Qwen3-MoE and DeepSeek-V3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

import quant_kernels

if TYPE_CHECKING:
    from pathlib import Path

_SIZES: Final = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS: Final = ("llama", "qwen3moe", "deepseekv3")


def _config(name: str) -> LlamaConfig | Qwen3MoeConfig | DeepseekV3Config:
    if name == "llama":
        return LlamaConfig(**_SIZES, num_key_value_heads=2)
    if name == "wide-llama":  # shards of whole blocks, on two ranks too
        return LlamaConfig(**{**_SIZES, "hidden_size": 256, "intermediate_size": 512}, num_key_value_heads=4)
    if name == "qwen3moe":
        return Qwen3MoeConfig(
            **_SIZES,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            num_key_value_heads=2,
            head_dim=32,
        )
    return DeepseekV3Config(
        **_SIZES,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_shared_experts=1,
    )


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint into a folder, once; return it."""
    target = folder / name
    if not (target / "config.json").exists():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(_config(name)).float()
        model.save_pretrained(target)
        document = json.loads((target / "config.json").read_text())
        document["dtype"] = "float32"  # bf16 stops with an illegal instruction where AMX is advertised but barred
        if name == "deepseekv3":
            document["topk_method"] = "noaux_tc"  # vLLM makes the router's bias by this alone
        (target / "config.json").write_text(json.dumps(document, indent=2))
    return target


def make_block_fp8(folder: Path) -> Path:
    """Write a checkpoint with its layers in FP8 by blocks, as DeepSeek's are stored, once; return it."""
    target = folder / "wide-llama-fp8"
    if (target / "config.json").exists():
        return target
    source = make("wide-llama", folder)
    target.mkdir()
    stored = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(word in key for word in ("embed_tokens", "lm_head", ".mlp.gate.")):
            stored[key] = tensor
            continue
        quantized = quant_kernels.quantize(tensor, "per_block_fp8")
        stored[key], stored[f"{key}_scale_inv"] = quantized.data, quantized.scale
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((source / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(document, indent=2))
    return target
