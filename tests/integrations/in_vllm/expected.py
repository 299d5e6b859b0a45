"""What each rank must hold: the checkpoint's weights quantized whole, then cut as vLLM cuts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file

import quant_kernels
from quant_spec import get_format

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
CUT: Final = {
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "q_b_proj", "kv_b_proj", "lm_head"), "column"),
    **dict.fromkeys(("o_proj", "down_proj"), "row"),
}


def shards_of(name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the checkpoint's weights that a module of vLLM is made of."""
    parent, _, leaf = name.rpartition(".")
    parts = FUSED.get(leaf, (leaf,))
    return [tensors[f"{parent}.{part}.weight".lstrip(".")] for part in parts]


def linear_bytes(shards: list[Tensor], name: str, target: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the bytes of codes and scales of one rank's piece of a Linear."""
    cut = CUT.get(name.rpartition(".")[2], "")
    whole = quant_kernels.quantize(torch.cat(shards), target)
    rows = [shard.shape[0] for shard in shards]
    return {
        "weight": piece(_raw(whole.data), rows, cut, rank, ranks),
        "weight_scale": piece(
            _raw(whole.scale), rows, cut if whole.scale.shape[-1] > 1 or cut == "column" else "", rank, ranks
        ),
    }


def expert_bytes(name: str, tensors: Mapping[str, Tensor], target: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the bytes of codes and scales of one rank's piece of the experts' stacks."""
    count = sum(key.startswith(f"{name}.") and key.endswith(".gate_proj.weight") for key in tensors)
    found = {}
    for attribute, leaves, cut in (
        ("w13_weight", ("gate_proj", "up_proj"), "column"),
        ("w2_weight", ("down_proj",), "row"),
    ):
        each = []
        for expert in range(count):
            shards = [tensors[f"{name}.{expert}.{leaf}.weight"] for leaf in leaves]
            whole = quant_kernels.quantize(torch.cat(shards), target)
            rows = [shard.shape[0] for shard in shards]
            wide = whole.scale.shape[-1] > 1 or cut == "column"
            each.append(
                (
                    piece(_raw(whole.data), rows, cut, rank, ranks),
                    piece(_raw(whole.scale), rows, cut if wide else "", rank, ranks),
                )
            )
        found[attribute] = torch.stack([data for data, _ in each])
        found[f"{attribute}_scale"] = torch.stack([scale for _, scale in each])
    return found


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def piece(whole: Tensor, rows: list[int], cut: str, rank: int, ranks: int) -> Tensor:
    """Return one rank's piece of bytes [N, ..]: fused shards are cut one by one."""
    if cut == "row":
        return whole.chunk(ranks, dim=-1)[rank].contiguous()
    if cut == "column":
        return torch.cat([shard.chunk(ranks)[rank] for shard in whole.split(rows)]).contiguous()
    return whole


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a block-FP8 checkpoint with its weights decoded to float32."""
    key = get_format("per_block_fp8").weight
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            quantized = quant_kernels.QuantizedTensor(tensor, scale, key, tuple(tensor.shape))
            found[name] = quant_kernels.dequantize(quantized, torch.float32)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found
