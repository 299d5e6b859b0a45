"""Tiny checkpoints of the three trees that matter, as transformers saves them, and block FP8 ones made from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quant_kernels import quantize

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
KEPT = ["lm_head", "*.gate.*"]
TREES = ("llama", "qwen3_moe", "deepseek_v3")
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
"""Tensors that block FP8 checkpoints leave in bf16."""


def tiny_config(tree: str, **changes: object) -> transformers.PreTrainedConfig:
    configs = {
        "llama": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **{**SIZES, **EXPERTS, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, **changes}
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **{**SIZES, **EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2},
            topk_group=1,
            first_k_dense_replace=1,
            **changes,
        ),
    }
    return configs[tree]()


def save_tiny(tree: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(tree, **changes))
    model.to(dtype).save_pretrained(folder)
    return folder


def save_block_fp8(source: Path, folder: Path) -> Path:
    """The checkpoint as DeepSeek publishes its own: 128 x 128 blocks, fp32 scales, lm_head and routers in bf16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(each in name for each in PLAIN):
            tensors[name] = tensor
            continue
        stored = quantize(tensor, "per_block_fp8")
        tensors[name], tensors[f"{name}_scale_inv"] = stored.data, stored.scale
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
