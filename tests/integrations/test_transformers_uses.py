"""Quantized models in other hands: compiled, cast, copied, offloaded, adapted, and the modules by themselves."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from tiny_checkpoints import KEPT, TREES, save_tiny  # noqa: E402

from quant_kernels import dequantize, quantize  # noqa: E402
from quant_kernels.integrations.transformers import QuantSpecConfig  # noqa: E402
from quant_kernels.nn import PackedWeight, QuantizedLinear  # noqa: E402
from quant_kernels.nn.grouped import grouped_linear  # noqa: E402
from quant_kernels.targets import TARGETS  # noqa: E402
from quant_spec import LoadError, QuantSpecError, get_format  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.client
MIXED: dict[str, Any] = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4"},
    "exclude_layer": KEPT,
}
IDS = torch.arange(1, 17)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {tree: save_tiny(tree, folder / tree) for tree in TREES}


def load(folder: Path, *, quantize_it: bool = True, **options: object) -> transformers.PreTrainedModel:
    given = {"quantization_config": QuantSpecConfig(MIXED, write_report=False)} if quantize_it else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given, **options).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_compiled_without_a_graph_break(tmp_path: Path) -> None:
    model = load(save_tiny("qwen3_moe", tmp_path / "shallow", num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(logits(compiled), logits(model))


def test_generation_compiles_by_itself_only_without_experts(plain: dict[str, Path]) -> None:
    assert {tree: load(plain[tree]).hf_quantizer.is_compileable for tree in TREES} == {
        "llama": True,
        "qwen3_moe": False,
        "deepseek_v3": False,
    }


def test_a_cast_leaves_codes_and_scales_alone(plain: dict[str, Path]) -> None:
    model = load(plain["qwen3_moe"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = model.to(torch.float16)
    for name, tensor in half.state_dict().items():
        held = any(name in each.tensor_names() for each in model.hf_quantizer._held.values())
        assert tensor.dtype == (before[name].dtype if held else torch.float16), name
        if held:
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    assert logits(half).dtype == torch.float16


def test_a_copy_computes_the_same(plain: dict[str, Path]) -> None:
    model = load(plain["qwen3_moe"])
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


@pytest.mark.parametrize("tree", ["llama", "qwen3_moe"])
def test_offloading(plain: dict[str, Path], tmp_path: Path, tree: str) -> None:
    others = ("model.layers.1", "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = {"model.layers.0": "disk", **dict.fromkeys(others, "cpu")}
    with pytest.raises(ValueError, match="device_map: found 'disk'"):
        load(plain[tree], device_map=places, offload_folder=tmp_path / "offload")
    model = load(plain[tree], device_map="cpu")
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", quantize_it=False, device_map=places, offload_folder=tmp_path / "offload")
    assert next(again.model.layers[0].parameters()).device.type == "meta"
    assert torch.equal(logits(again), logits(model))


def test_training_and_plain_linear_layers_are_not_promised(plain: dict[str, Path]) -> None:
    model = load(plain["llama"])
    assert not model.hf_quantizer.is_trainable  # what transformers' Trainer asks
    # Adapters (peft) and pruning look for nn.Linear, whose weight holds values: this one's holds codes.
    assert not isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)
    assert not any(parameter.requires_grad for parameter in model.model.layers[0].mlp.parameters())


def test_spreading_over_ranks_is_refused(plain: dict[str, Path]) -> None:
    config = transformers.AutoConfig.from_pretrained(plain["llama"])
    config.distributed_config = {"tp_size": 2}
    with pytest.raises(LoadError, match="distributed_config"):
        load(plain["llama"], config=config)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer(target: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = QuantizedLinear(128, 96, get_format(target).weight, dtype=dtype)
    weight = quantize(torch.randn(96, 128), target)
    for suffix, parameter in layer.packed["weight"].stored(weight).items():
        held = layer._parameters[f"weight{suffix}"]
        assert (held.shape, held.dtype) == (parameter.shape, parameter.dtype)
        layer._parameters[f"weight{suffix}"] = parameter
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 128, dtype=dtype, requires_grad=True)
    wanted = functional.linear(x, dequantize(weight, dtype), layer.bias)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-1}
    assert torch.allclose(layer(x), wanted, **tolerance)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.allclose(gradient, torch.autograd.grad(wanted.sum(), x)[0], **tolerance)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    expected, layer.packed = layer(x), pickle.loads(pickle.dumps(layer.packed))  # noqa: S301  (made here)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_each_expert_meet_its_own_matrix(target: str) -> None:
    torch.manual_seed(2)
    stack = quantize(torch.randn(4, 96, 128), target)
    dense = dequantize(stack, torch.float32)
    x, bias = torch.randn(9, 128), torch.randn(4, 96)
    offsets = torch.tensor([3, 3, 7, 8])  # no row for expert 1; the last row belongs to no one
    found = grouped_linear(x, offsets, stack, bias=bias)
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 7)), (3, slice(7, 8))):
        assert torch.allclose(found[rows], functional.linear(x[rows], dense[expert], bias[expert]), atol=1e-4)
    assert not found[8].any()


def test_formats_that_nothing_computes_with_are_refused_by_name() -> None:
    with pytest.raises(QuantSpecError, match="found int8/per_channel; modules here can hold: ptpc_fp8"):
        QuantizedLinear(64, 64, get_format("int8_per_channel").weight)
    assert PackedWeight(get_format("nvfp4").weight, (8, 64, 32), 2).empty("meta")["_scale_2"].shape == (8, 2)
