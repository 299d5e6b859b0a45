"""Tiny checkpoints with the names and shapes of real model families."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

sys.path.insert(0, str(Path(__file__).parent))

HIDDEN, INNER, VOCAB, LAYERS, EXPERTS, HEAD = 64, 128, 96, 2, 4, 32
Tensors = dict[str, torch.Tensor]


class Writer(Protocol):
    """Writes tensors as a checkpoint folder; other keywords go into config.json."""

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], name: str = ..., *, shards: int = ..., **config: object
    ) -> Path: ...


def weight(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def attention(prefix: str, dtype: torch.dtype, seed: int) -> Tensors:
    rows = {"q_proj": HIDDEN, "k_proj": HEAD, "v_proj": HEAD, "o_proj": HIDDEN}
    found = {
        f"{prefix}.self_attn.{name}.weight": weight(n, HIDDEN, seed=seed + n, dtype=dtype) for name, n in rows.items()
    }
    found[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    found[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    return found


def mlp(prefix: str, dtype: torch.dtype, seed: int, inner: int = INNER) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": weight(inner, HIDDEN, seed=seed, dtype=dtype),
        f"{prefix}.up_proj.weight": weight(inner, HIDDEN, seed=seed + 1, dtype=dtype),
        f"{prefix}.down_proj.weight": weight(HIDDEN, inner, seed=seed + 2, dtype=dtype),
    }


def outer(dtype: torch.dtype) -> Tensors:
    return {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN, seed=7, dtype=dtype),
        "model.norm.weight": torch.ones(HIDDEN, dtype=dtype),
        "lm_head.weight": weight(VOCAB, HIDDEN, seed=8, dtype=dtype),
    }


def llama(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    found = outer(dtype)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= attention(prefix, dtype, seed=100 * layer) | mlp(f"{prefix}.mlp", dtype, seed=100 * layer + 50)
    return found


def qwen3_moe(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    found = outer(dtype)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= attention(prefix, dtype, seed=100 * layer)
        found[f"{prefix}.mlp.gate.weight"] = weight(EXPERTS, HIDDEN, seed=layer, dtype=dtype)
        for expert in range(EXPERTS):
            found |= mlp(f"{prefix}.mlp.experts.{expert}", dtype, seed=1000 * layer + 10 * expert, inner=HIDDEN)
    return found


def stacked_moe(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    found = outer(dtype)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= attention(prefix, dtype, seed=100 * layer)
        found[f"{prefix}.mlp.gate.weight"] = weight(EXPERTS, HIDDEN, seed=layer, dtype=dtype)
        found[f"{prefix}.mlp.experts.gate_up_proj"] = weight(EXPERTS, 2 * HEAD, HIDDEN, seed=layer + 20, dtype=dtype)
        found[f"{prefix}.mlp.experts.down_proj"] = weight(EXPERTS, HIDDEN, HEAD, seed=layer + 30, dtype=dtype)
    return found


@pytest.fixture
def models() -> dict[str, Callable[..., Tensors]]:
    """The tensors of each tiny model, by name; each function takes a dtype."""
    return {"llama": llama, "qwen3_moe": qwen3_moe, "stacked_moe": stacked_moe}


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write tensors as a checkpoint folder: one file, or several with an index."""

    def writer(tensors: Mapping[str, torch.Tensor], name: str = "model", *, shards: int = 1, **config: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        (folder / "tokenizer.json").write_text("{}")
        if shards == 1:
            save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = list(tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {each: tensors[each] for each in names[shard::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return writer


@pytest.fixture
def llama_dir(write: Writer) -> Path:
    """A Llama checkpoint in one file."""
    return write(llama(), "llama")


@pytest.fixture
def moe_dir(write: Writer) -> Path:
    """A Qwen3-MoE checkpoint with experts one by one, over three shards."""
    return write(qwen3_moe(), "moe", shards=3, model_type="qwen3_moe")


@pytest.fixture
def stacked_dir(write: Writer) -> Path:
    """A MoE checkpoint with stacked experts."""
    return write(stacked_moe(), "stacked", model_type="qwen3_moe")
