"""OnlineQuantizer: whatever the order, the threads and the shape of what arrives, the result is quantize_model's."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import TYPE_CHECKING

import pytest
import torch
from small_models import PACKED, Engine, assert_same, checkpoint, filled, state
from torch import nn

from quant_kernels import QuantizedTensor, dequantize, quantize
from quant_kernels.checks import NonFiniteError
from quant_kernels.loading import streaming
from quant_kernels.loading.model import quantize_model
from quant_kernels.loading.staging import HostStager
from quant_kernels.loading.streaming import OnlineQuantizer
from quant_spec import LoadError, NameRules, QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*experts*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}


def config(request: object = None, source: dict[str, object] | None = None) -> QuantizationConfig:
    names = NameRules(packed_modules_mapping=PACKED)
    below = QuantizationConfig.from_dict(source, names=names) if source else None
    return QuantizationConfig.from_online(request or REQUEST, source=below, names=names)


@pytest.fixture(scope="module")
def loaded() -> Engine:
    model = filled(Engine())
    assert isinstance(model, Engine)
    return model


def whole_tensors(model: Engine) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


def experts_as_stacks(model: Engine) -> list[tuple[str, torch.Tensor]]:
    """Fused attention, stacks under transformers' names: gate and up together."""
    return [
        (name.replace("w13_weight", "gate_up_proj").replace("w2_weight", "down_proj"), tensor)
        for name, tensor in whole_tensors(model)
    ]


def experts_fused(model: Engine) -> list[tuple[str, torch.Tensor]]:
    """One gate_up matrix an expert."""
    found = []
    for name, tensor in whole_tensors(model):
        stem, _, leaf = name.rpartition(".")
        leaves = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
        if leaf in leaves:
            found += [(f"{stem}.{index}.{leaves[leaf]}.weight", matrix.clone()) for index, matrix in enumerate(tensor)]
        else:
            found.append((name, tensor))
    return found


SHAPES = {
    "per expert": lambda model: list(checkpoint(model)),
    "whole": whole_tensors,
    "stacks": experts_as_stacks,
    "fused experts": experts_fused,
}


def quantized(model: Engine, request: object = None, **options: object) -> Engine:
    expected = deepcopy(model)
    quantize_model(expected, config(request), write_report=False, **options)
    return expected


@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_gives_what_quantize_model_gives(loaded: Engine, shape: str, seed: int, target: str) -> None:
    request = {"global_quant_config": target, "exclude_layer": ["lm_head", "*.gate.*"]}
    tensors = SHAPES[shape](loaded)
    random.Random(seed).shuffle(tensors)  # noqa: S311  (an order)
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(request), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    assert_same(model, quantized(loaded, request))
    assert quantizer.report.num_layers == 6


def test_several_threads(loaded: Engine) -> None:
    tensors = list(checkpoint(loaded))
    random.Random(3).shuffle(tensors)  # noqa: S311  (an order)
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(), write_report=False) as quantizer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: quantizer.load(*pair), tensors))
    assert_same(model, quantized(loaded))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["mxfp4", "nvfp4"])
def test_pieces_gathered_in_buffers_give_the_same(
    loaded: Engine, shape: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where pieces are copied to their places in one buffer a weight."""
    monkeypatch.setattr(streaming, "new_stager", lambda device: HostStager(device, gathers=True))
    request = {"global_quant_config": target, "exclude_layer": ["lm_head", "*.gate.*"]}
    tensors = SHAPES[shape](loaded)
    random.Random(5).shuffle(tensors)  # noqa: S311  (an order)
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(request), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    assert_same(model, quantized(loaded, request))


def test_report_says_what_was_read(loaded: Engine, tmp_path: object) -> None:
    tensors = list(checkpoint(loaded))
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(), report_dir=tmp_path, measure=True) as quantizer:
        quantizer.load_all(tensors)
    report = quantizer.report
    assert report.saved_to is not None
    assert report.loading is not None
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    assert report.loading.bytes_read == report.bytes_before == nbytes
    expected = quantize_model(deepcopy(loaded), config(), write_report=False, measure=True)
    assert report.bytes_after == expected.bytes_after
    for mine, other in zip(report.layers, expected.layers, strict=True):
        assert (mine.layer, mine.bytes_before, mine.bytes_after) == (other.layer, other.bytes_before, other.bytes_after)
        assert mine.sqnr_db == pytest.approx(other.sqnr_db, rel=1e-6)
        assert (mine.source, mine.weights, mine.shapes) == (other.source, other.weights, other.shapes)


class Trouble:
    """Loads a model but for one change, and returns the error."""

    def __init__(self, loaded: Engine) -> None:
        self.tensors = dict(checkpoint(loaded))

    def error(self, *extra: tuple[str, torch.Tensor], **options: object) -> str:
        quantizer = OnlineQuantizer(Engine(device="meta"), config(), write_report=False, **options)
        with pytest.raises(LoadError) as caught, quantizer:
            quantizer.load_all((*self.tensors.items(), *extra))
        return str(caught.value)


@pytest.fixture
def trouble(loaded: Engine) -> Trouble:
    return Trouble(loaded)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(trouble: Trouble, name: str) -> None:
    del trouble.tensors[name]
    assert trouble.error() == f"1 tensors are missing: {name}"


def test_missing_expert_is_named(trouble: Trouble) -> None:
    del trouble.tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert trouble.error() == "1 tensors are missing: model.layers.1.mlp.experts.w13_weight[expert 2].up"


def test_unexpected_tensor_is_named_with_the_nearest(trouble: Trouble) -> None:
    text = trouble.error(("model.layers.0.self_attn.o_prj.weight", torch.zeros(1)))
    assert text.startswith("model.layers.0.self_attn.o_prj.weight: unexpected tensor")
    assert "did you mean 'model.layers.0.self_attn.o_proj.weight'?" in text


def test_ignored_tensor_is_skipped(loaded: Engine) -> None:
    with OnlineQuantizer(Engine(device="meta"), config(), ignore=["mtp.*"], write_report=False) as quantizer:
        quantizer.load("mtp.layers.0.weight", torch.zeros(1))
        quantizer.load_all(checkpoint(loaded))
    assert quantizer.report.num_layers == 6


def test_expert_that_the_model_lacks_is_unexpected(trouble: Trouble) -> None:
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    assert f"{name}: unexpected tensor" in trouble.error((name, torch.zeros(128, 256)))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "late"),
        ("model.layers.0.mlp.experts.1.down_proj.weight", "late"),
        ("model.embed_tokens.weight", "duplicate"),
    ],
)
def test_repeated_tensor_is_named(trouble: Trouble, name: str, word: str) -> None:
    assert f"{name}: {word} tensor" in trouble.error((name, trouble.tensors[name]))


def test_duplicates_before_a_layer_is_complete(loaded: Engine) -> None:
    tensors = dict(checkpoint(loaded))
    name = "model.layers.0.self_attn.q_proj.weight"
    quantizer = OnlineQuantizer(Engine(device="meta"), config(), write_report=False)
    quantizer.load(name, tensors[name])
    with pytest.raises(LoadError, match=r"q_proj\.weight: duplicate tensor: it has arrived before"), quantizer:
        quantizer.load(name, tensors[name])
    quantizer = OnlineQuantizer(Engine(device="meta"), config(), write_report=False)
    first = "model.layers.0.mlp.experts.1.up_proj.weight"
    quantizer.load(first, tensors[first])
    with (
        pytest.raises(LoadError, match=r"w13_weight: duplicate tensor: .*experts\.1\.up_proj\.weight holds"),
        quantizer,
    ):
        quantizer.load("model.layers.0.mlp.experts.w13_weight", torch.zeros(4, 256, 256))


@pytest.mark.parametrize(
    ("name", "shape", "allowed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (128, 256), "[256, 256]"),
        ("model.layers.0.self_attn.o_proj.weight", (256, 255), "[256, 256]"),
        ("model.layers.0.mlp.experts.0.down_proj.weight", (128, 256), "[256, 128]"),
        ("model.layers.0.mlp.experts.w2_weight", (3, 256, 128), "[4, 256, 128]"),
        ("model.embed_tokens.weight", (95, 256), "[96, 256]"),
    ],
)
def test_misshapen_tensor_is_named(name: str, shape: tuple[int, ...], allowed: str) -> None:
    with pytest.raises(LoadError) as caught, OnlineQuantizer(Engine(device="meta"), config(), write_report=False) as q:
        q.load(name, torch.zeros(shape, dtype=torch.bfloat16))
    assert str(caught.value) == f"{name}: shape {list(shape)}; allowed: {allowed}"


def test_bad_value_is_named_by_its_tensor(trouble: Trouble) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    trouble.tensors[name][5, 3] = float("inf")
    model = Engine(device="meta")
    with pytest.raises(NonFiniteError) as caught, OnlineQuantizer(model, config(), write_report=False) as quantizer:
        quantizer.load_all(trouble.tensors.items())
    assert name in str(caught.value)
    assert caught.value.rows == (5,)
    assert model.model.layers[1].mlp.experts.w2_weight.device.type == "meta"
    assert model.model.layers[0].mlp.experts.w2_weight.dtype is torch.float4_e2m1fn_x2


def test_error_of_the_loader_stops_the_thread(loaded: Engine) -> None:
    class BrokenError(RuntimeError):
        pass

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(checkpoint(loaded), 10)
        raise BrokenError

    before = threading.active_count()
    quantizer = OnlineQuantizer(Engine(device="meta"), config(), write_report=False)
    with pytest.raises(BrokenError), quantizer:
        quantizer.load_all(broken())
    assert threading.active_count() == before
    with pytest.raises(LoadError, match="not loaded yet"):
        _ = quantizer.report


def test_staging_stays_within_its_budget(loaded: Engine) -> None:
    """Layer after layer, in a budget of half a layer of experts: no more than one layer beside it is ever held."""
    largest = 4 * (256 * 256 + 256 * 128) * 2
    with OnlineQuantizer(Engine(device="meta"), config(), staging_bytes=largest // 2, write_report=False) as quantizer:
        quantizer.load_all(checkpoint(loaded))
    assert quantizer.peak_staging_bytes <= largest + largest // 2


def test_overflow_names_the_layers_that_wait(loaded: Engine) -> None:
    tensors = [pair for pair in checkpoint(loaded) if "experts" in pair[0]]
    tensors.sort(key=lambda pair: pair[0].split("experts.")[1])
    quantizer = OnlineQuantizer(Engine(device="meta"), config(), staging_bytes=200_000, write_report=False)
    with pytest.raises(LoadError) as caught, quantizer:
        quantizer.load_all(tensors)
    text = str(caught.value)
    assert "staging budget of 200,000 bytes exceeded" in text
    assert "2 layers wait" in text
    assert "model.layers.0.mlp.experts (" in text


def test_source_is_freed_once_its_layer_is_converted(loaded: Engine) -> None:
    with OnlineQuantizer(Engine(device="meta"), config(), write_report=False) as quantizer:
        quantizer.load_all(checkpoint(loaded))
        quantizer._queue.drain()
        assert quantizer._budget.held == 0
        assert not quantizer._pending


def test_deferred_layer_has_its_source_until_it_is_released(loaded: Engine) -> None:
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(), defer=["*.o_proj", "*experts"], write_report=False) as quantizer:
        quantizer.load_all(checkpoint(loaded))
        quantizer._queue.drain()
        weight = model.model.layers[0].self_attn.o_proj.weight
        assert torch.equal(weight, loaded.model.layers[0].self_attn.o_proj.weight)
        experts = model.model.layers[1].mlp.experts
        assert torch.equal(experts.w13_weight, loaded.model.layers[1].mlp.experts.w13_weight)
        quantizer.release("model.layers.0.self_attn.o_proj")
        assert model.model.layers[0].self_attn.o_proj.weight.dtype is torch.float8_e4m3fn
        with pytest.raises(LoadError, match="no deferred layer"):
            quantizer.release("model.layers.0.self_attn.o_proj")
    assert_same(model, quantized(loaded))


# -- quantized checkpoints --------------------------------------------------------------------------------------------

BLOCK: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "ignored_layers": ["lm_head", "gate"],
}


def block_checkpoint(model: Engine) -> list[tuple[str, torch.Tensor]]:
    """Return a block-FP8 checkpoint of a model."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in checkpoint(model):
        if "_proj.weight" in name:
            made = quantize(tensor, "per_block_fp8")
            found += [(name, made.data), (f"{name}_scale_inv", made.scale)]
        else:
            found.append((name, tensor))
    return found


def decoded(tensors: list[tuple[str, torch.Tensor]], model: Engine) -> Engine:
    """Return the model that a block-FP8 checkpoint means, in bf16."""
    stored = dict(tensors)
    result = deepcopy(model)
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            key = quantize(torch.ones(128, 128), "per_block_fp8").key
            dense[name] = dequantize(QuantizedTensor(tensor, scale, key, tuple(tensor.shape)))
    for name, module in result.named_modules():
        if name.endswith("qkv_proj"):
            stem = name.removesuffix("qkv_proj")
            module.weight.data = torch.cat([dense[f"{stem}{each}.weight"] for each in PACKED["qkv_proj"]])
        elif name.endswith("o_proj"):
            module.weight.data = dense[f"{name}.weight"]
        elif name.endswith("experts"):
            for index in range(4):
                gate, up, down = (
                    dense[f"{name}.{index}.{leaf}.weight"] for leaf in ("gate_proj", "up_proj", "down_proj")
                )
                module.w13_weight.data[index], module.w2_weight.data[index] = torch.cat([gate, up]), down
    return result


@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4", "mxfp8", "nvfp4"])
def test_block_source_streams_to_what_its_values_quantize_to(loaded: Engine, target: str) -> None:
    tensors = block_checkpoint(loaded)
    random.Random(0).shuffle(tensors)  # noqa: S311  (an order)
    request = {"global_quant_config": target, "exclude_layer": ["lm_head", "*.gate.*"]}
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(request, BLOCK), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    assert {layer.source for layer in quantizer.report.layers} == {"fp8_e4m3/block_128x128"}
    assert_same(model, quantized(decoded(tensors, loaded), request))


def test_kept_layers_of_a_quantized_checkpoint_keep_codes_and_scales(loaded: Engine) -> None:
    tensors = block_checkpoint(loaded)
    stored = dict(tensors)
    model = Engine(device="meta")
    request = {"layer_quant_config": {"*experts*": "mxfp4"}}
    with OnlineQuantizer(model, config(request, BLOCK), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    linear = model.model.layers[0].self_attn.o_proj
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(linear.weight.view(torch.uint8), stored[name].view(torch.uint8))
    assert torch.equal(linear.weight_scale_inv, stored[f"{name}_scale_inv"])
    qkv = model.model.layers[0].self_attn.qkv_proj
    parts = [stored[f"model.layers.0.self_attn.{each}.weight"].view(torch.uint8) for each in PACKED["qkv_proj"]]
    assert torch.equal(qkv.weight.view(torch.uint8), torch.cat(parts))
    assert qkv.weight_scale_inv.shape == (4, 2)
    kept = {layer.layer: layer.source for layer in quantizer.report.kept}
    assert kept["model.layers.0.self_attn.o_proj"] == "fp8_e4m3/block_128x128"
    assert kept["lm_head"] == "bf16"


def test_missing_scale_of_a_quantized_tensor_is_named(loaded: Engine) -> None:
    tensors = dict(block_checkpoint(loaded))
    del tensors["model.layers.0.self_attn.k_proj.weight_scale_inv"]
    quantizer = OnlineQuantizer(Engine(device="meta"), config(None, BLOCK), write_report=False)
    missing = r"1 tensors are missing: model\.layers\.0\.self_attn\.k_proj\.weight_scale"
    with pytest.raises(LoadError, match=missing), quantizer:
        quantizer.load_all(tensors.items())


def test_deferred_quantized_layer_is_converted_from_the_module(loaded: Engine) -> None:
    tensors = block_checkpoint(loaded)
    model, straight = Engine(device="meta"), Engine(device="meta")
    with OnlineQuantizer(model, config(None, BLOCK), defer=["*_proj", "*experts"], write_report=False) as quantizer:
        quantizer.load_all(tensors)
    with OnlineQuantizer(straight, config(None, BLOCK), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    assert_same(model, straight)


class TiedHead(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 64, device=device, dtype=torch.bfloat16)
        self.proj = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(64, 64, bias=False, device=device, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed_tokens.weight


def test_tied_head_is_loaded_with_the_embedding() -> None:
    source = filled(TiedHead("cpu"))
    model = TiedHead("meta")
    with OnlineQuantizer(model, {"global_quant_config": "mxfp8"}, write_report=False) as quantizer:
        quantizer.load_all((name, tensor) for name, tensor in source.state_dict().items() if name != "lm_head.weight")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)
    assert model.proj.weight.dtype is torch.float8_e4m3fn


def test_state_is_that_of_a_real_model(loaded: Engine) -> None:
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(), write_report=False) as quantizer:
        quantizer.load_all(checkpoint(loaded))
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    assert len(state(model)) == len(state(quantized(loaded)))


@pytest.mark.parametrize("options", [{"fnuz": True}, {"layout": "cdna"}, {"scale_rounding": "rceil"}, {"check": False}])
def test_options_mean_the_same_as_in_memory(loaded: Engine, options: dict[str, object]) -> None:
    model = Engine(device="meta")
    with OnlineQuantizer(model, config(), write_report=False, **options) as quantizer:
        quantizer.load_all(checkpoint(loaded))
    assert_same(model, quantized(loaded, **options))
