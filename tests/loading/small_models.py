"""Small models with the module trees that serving engines build: fused qkv and gate_up, stacked experts, a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class QKV(nn.Linear):
    """A Linear of three projections, whose rows it knows."""

    def __init__(self, hidden: int, sizes: tuple[int, ...], device: str = "cpu") -> None:
        super().__init__(hidden, sum(sizes), bias=False, dtype=torch.bfloat16, device=device)
        self.output_partition_sizes = list(sizes)


class Experts(nn.Module):
    """Stacked experts: w13 [E, 2·I, H], w2 [E, H, I]."""

    def __init__(self, experts: int, hidden: int, inner: int, device: str = "cpu") -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=device))
        self.w2_weight = nn.Parameter(torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device=device))


class MoE(nn.Module):
    def __init__(self, experts: int, hidden: int, inner: int, device: str = "cpu") -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False, dtype=torch.bfloat16, device=device)
        self.experts = Experts(experts, hidden, inner, device)


class Attention(nn.Module):
    def __init__(self, hidden: int, sizes: tuple[int, ...], device: str = "cpu") -> None:
        super().__init__()
        self.qkv_proj = QKV(hidden, sizes, device)
        self.o_proj = nn.Linear(sizes[0], hidden, bias=True, dtype=torch.bfloat16, device=device)


class Block(nn.Module):
    def __init__(self, experts: int, hidden: int, inner: int, sizes: tuple[int, ...], device: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, dtype=torch.bfloat16, device=device)
        self.self_attn = Attention(hidden, sizes, device)
        self.mlp = MoE(experts, hidden, inner, device)


class Inner(nn.Module):
    def __init__(self, blocks: int, *shape: object) -> None:
        super().__init__()
        experts, hidden, inner, sizes, device = shape
        self.embed_tokens = nn.Embedding(96, hidden, dtype=torch.bfloat16, device=device)
        self.layers = nn.ModuleList(Block(experts, hidden, inner, sizes, device) for _ in range(blocks))


class Engine(nn.Module):
    """A mixture of experts as an engine holds it."""

    def __init__(
        self,
        blocks: int = 2,
        experts: int = 4,
        hidden: int = 256,
        inner: int = 128,
        sizes: tuple[int, ...] = (256, 128, 128),
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.model = Inner(blocks, experts, hidden, inner, sizes, device)
        self.lm_head = nn.Linear(hidden, 96, bias=False, dtype=torch.bfloat16, device=device)


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every floating parameter with reproducible values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * torch.logspace(-2, 1, parameter.shape[-1]))
    return model


def checkpoint(model: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model as a checkpoint holds them: projections apart, one tensor an expert."""
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("qkv_proj"):
            sizes = model.get_submodule(stem).output_partition_sizes
            for shard, part in zip(PACKED["qkv_proj"], tensor.split(sizes), strict=True):
                yield f"{stem.removesuffix('qkv_proj')}{shard}.{leaf}", part.clone()
        elif leaf == "w13_weight":
            for expert, matrix in enumerate(tensor):
                for shard, part in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    yield f"{stem}.{expert}.{shard}.weight", part.clone()
        elif leaf == "w2_weight":
            for expert, matrix in enumerate(tensor):
                yield f"{stem}.{expert}.down_proj.weight", matrix.clone()
        else:
            yield name, tensor.clone()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the bytes of every parameter and buffer, by name."""
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        found[name] = (
            (tensor.detach() if tensor.dim() else tensor.detach().reshape(1)).contiguous().view(torch.uint8).clone()
        )
    return found


def assert_same(first: nn.Module, second: nn.Module) -> None:
    """Compare two models byte for byte, dtypes and attributes included."""
    one, two = state(first), state(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    for (name, left), (_, right) in zip(first.named_modules(), second.named_modules(), strict=True):
        assert getattr(left, "quant_type", None) == getattr(right, "quant_type", None), name
        assert getattr(left, "quant_config", None) == getattr(right, "quant_config", None), name
