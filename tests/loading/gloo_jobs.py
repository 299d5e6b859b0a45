"""What the processes of test_parallel_processes.py do; a module of its own, since they import it by name."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from quant_kernels import OnlineQuantizer, quantize, quantize_model, quantize_shard
from quant_kernels.loading.distributed import as_ranks
from quant_spec import LoadError

TIMEOUT = 5.0


def whole_weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, 256, 512, generator=generator) * torch.logspace(-3, 2, 512)).bfloat16()


class Block(nn.Module):
    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up_proj = nn.Linear(up.shape[1], up.shape[0], bias=False, dtype=up.dtype)
        self.down_proj = nn.Linear(down.shape[1], down.shape[0], bias=False, dtype=down.dtype)
        self.up_proj.weight.data, self.down_proj.weight.data = up.contiguous(), down.contiguous()
        self.up_proj.quant_parallel, self.down_proj.quant_parallel = "column", "row"


def block(rank: int, size: int) -> Block:
    whole = whole_weight()
    return Block(whole[0].chunk(size, 0)[rank], whole[1].chunk(size, 1)[rank])


def shards_equal(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = whole_weight()
    for name in ("ptpc_fp8", "mxfp4", "nvfp4", "per_block_fp8"):
        expected = quantize(whole, name)
        for parallel, axis in (("column", -2), ("row", -1)):
            shard = whole.chunk(size, axis)[rank]
            group = mesh if name == "nvfp4" else dist.group.WORLD
            made = quantize_shard(shard, name, parallel=parallel, group=group, check=True)
            codes = expected.data.view(torch.uint8).chunk(size, axis)[rank]
            assert torch.equal(made.data.view(torch.uint8), codes), (name, parallel)
    ranks = as_ranks(dist.group.WORLD)
    assert ranks.gather(("rank", rank), "test") == [("rank", each) for each in range(size)]


def models_equal(rank: int, size: int) -> None:
    model = block(rank, size)
    report = quantize_model(model, {"global_quant_config": "ptpc_fp8"}, group=dist.group.WORLD, write_report=False)
    whole = whole_weight()
    up, down = quantize(whole[0], "ptpc_fp8"), quantize(whole[1], "ptpc_fp8")
    assert torch.equal(model.up_proj.weight.view(torch.uint8), up.data.view(torch.uint8).chunk(size, 0)[rank])
    assert torch.equal(model.down_proj.weight.view(torch.uint8), down.data.view(torch.uint8).chunk(size, 1)[rank])
    assert torch.equal(model.down_proj.weight_scale, down.scale)
    assert report.loading is not None
    assert (report.num_layers, report.loading.ranks, report.loading.sent_bytes) == (2, size, size * 4 * 257)


def other_config(rank: int, size: int) -> None:
    target = "mxfp8" if rank == 1 else "ptpc_fp8"
    quantize_model(
        block(rank, size), {"global_quant_config": target}, group=dist.group.WORLD, timeout=TIMEOUT, write_report=False
    )


def dtensors_refused(rank: int, size: int) -> None:
    """A model whose parameters are DTensors is refused by name, whether it holds values or is to be loaded."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for device in ("cpu", "meta"):
        model = block(rank, size).to(device)
        model.up_proj.weight = nn.Parameter(DTensor.from_local(model.up_proj.weight.data, mesh, [Shard(0)]))
        try:
            if device == "cpu":
                quantize_model(model, {"global_quant_config": "ptpc_fp8"}, group=mesh, write_report=False)
            else:
                OnlineQuantizer(model, {"global_quant_config": "ptpc_fp8"}, group=mesh, write_report=False)
        except LoadError as error:
            assert "up_proj.weight: a DTensor (Shard(dim=0))" in str(error), error  # noqa: PT017
            assert "to_local()" in str(error)  # noqa: PT017
        else:
            message = "a DTensor was taken"
            raise AssertionError(message)
        assert model.down_proj.weight.dtype is torch.bfloat16


WORK = {each.__name__: each for each in (shards_equal, models_equal, dtensors_refused, other_config)}


def process(rank: int, size: int, folder: str, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for job in jobs:
        started = time.perf_counter()
        try:
            WORK[job](rank, size)
            text = "well"
        except Exception:  # noqa: BLE001  (read by the test)
            text = traceback.format_exc()
        Path(folder, f"{job}-{rank}").write_text(f"{time.perf_counter() - started:.3f}\n{text}")
    os._exit(0)  # a broken group may not wait for others when it is torn down
