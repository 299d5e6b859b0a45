"""Loading on a GPU: what the host gives, bit for bit; transfers within the memory allowed; NCCL."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from small_models import PACKED, Engine, checkpoint, filled
from test_streaming import BLOCK, block_checkpoint
from torch import nn

from quant_kernels import OnlineQuantizer, quantize_model, quantize_shard
from quant_spec import LoadError, NameRules, QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TARGETS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")


def config(target: str, source: dict[str, object] | None = None) -> QuantizationConfig:
    names = NameRules(packed_modules_mapping=PACKED)
    below = QuantizationConfig.from_dict(source, names=names) if source else None
    request = {"global_quant_config": target, "exclude_layer": ["lm_head", "*.gate.*"]}
    return QuantizationConfig.from_online(request, source=below, names=names)


def raw(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        found[name] = flat.view(torch.uint8).cpu()
    return found


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    one, two = raw(first), raw(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.fixture(scope="module")
def loaded() -> Engine:
    model = filled(Engine())
    assert isinstance(model, Engine)
    return model


@pytest.mark.parametrize("target", TARGETS)
def test_model_on_the_device_equals_the_hosts(loaded: Engine, target: str) -> None:
    host, device = deepcopy(loaded), deepcopy(loaded).cuda()
    quantize_model(host, config(target), write_report=False)
    report = quantize_model(device, config(target), write_report=False)
    assert_equal(host, device)
    assert report.loading is not None
    assert report.loading.peak_bytes > 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stored", ["bf16", "block fp8"])
def test_streaming_to_the_device_equals_the_hosts(loaded: Engine, target: str, stored: str) -> None:
    tensors = block_checkpoint(loaded) if stored == "block fp8" else list(checkpoint(loaded))
    source = BLOCK if stored == "block fp8" else None
    if stored == "block fp8" and target == "per_block_fp8":
        pytest.skip("already in that format")
    random.Random(0).shuffle(tensors)  # noqa: S311  (an order)
    host, device = Engine(device="meta"), Engine(device="meta")
    with OnlineQuantizer(host, config(target, source), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    with (
        OnlineQuantizer(device, config(target, source), device="cuda", write_report=False) as quantizer,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda pair: quantizer.load(*pair), tensors))
    assert all(tensor.is_cuda for tensor in (*device.parameters(), *device.buffers()))
    assert_equal(host, device)


def test_pinned_tensors_pass_straight_through(loaded: Engine) -> None:
    tensors = [(name, tensor.pin_memory()) for name, tensor in checkpoint(loaded)]
    host, device = Engine(device="meta"), Engine(device="meta")
    for model, where in ((host, "cpu"), (device, "cuda")):
        with OnlineQuantizer(model, config("mxfp4"), device=where, write_report=False) as quantizer:
            quantizer.load_all(tensors)
    assert_equal(host, device)


def test_peak_device_memory_is_bounded() -> None:
    """Quantized model, the largest layer's source, and the staging budget."""
    layers, side = 12, 2048
    source = layers * side * side * 2

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(layers):
            yield f"{index}.weight", torch.randn(side, side).bfloat16()

    model = nn.ModuleList(nn.Linear(side, side, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(layers))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    staging = 2 * side * side * 2
    options = {"device": "cuda", "staging_bytes": staging, "write_report": False}
    with OnlineQuantizer(model, {"global_quant_config": "mxfp4"}, **options) as quantizer:
        quantizer.load_all(tensors())
    peak = torch.cuda.max_memory_allocated() - before
    quantized = source // 4 + source // 64
    assert peak <= quantized + side * side * 2 + staging + (1 << 20)


def test_bad_value_on_the_device_is_named(loaded: Engine) -> None:
    model = deepcopy(loaded).cuda()
    model.model.layers[1].mlp.experts.w2_weight.data[2, 5, 3] = float("nan")
    with pytest.raises(LoadError, match=r"w2_weight: expert 2.*first bad rows: 5"):
        quantize_model(model, config("mxfp4"), write_report=False)
    assert model.model.layers[1].mlp.experts.w2_weight.dtype is torch.bfloat16


def test_nccl_agrees_with_itself(tmp_path: Path) -> None:
    """One rank: every exchange runs, and changes nothing."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = torch.randn(64, 256, device="cuda").bfloat16()
        made = quantize_shard(weight, "ptpc_fp8", parallel="row", group=dist.group.WORLD, check=True)
        assert made.data.shape == weight.shape
        report = quantize_model(
            nn.Sequential(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)),
            {"global_quant_config": "mxfp8"},
            group=dist.group.WORLD,
            write_report=False,
        )
        assert report.num_layers == 1
    finally:
        dist.destroy_process_group()
