"""from_pretrained with a request: what is stored, what it computes, and that it can be saved and read again."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from tiny_checkpoints import KEPT, TREES, save_block_fp8, save_tiny, tensors_of  # noqa: E402

from quant_kernels import QuantizedTensor, dequantize, quantize, quantize_checkpoint, requantize  # noqa: E402
from quant_kernels.integrations.transformers import QuantSpecConfig  # noqa: E402
from quant_kernels.nn import QuantizedExperts, QuantizedLinear  # noqa: E402
from quant_kernels.targets import TARGETS  # noqa: E402
from quant_spec import LoadError, QuantizationConfig  # noqa: E402
from quant_spec.formats import format_of_key  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from quant_spec.report import QuantReport

pytestmark = pytest.mark.client
MIXED: dict[str, Any] = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4"},
    "exclude_layer": KEPT,
}
# Every format in linear layers and stacks of experts; the other trees with one each.
CASES = [("llama", "mxfp4"), ("deepseek_v3", "nvfp4"), *(("qwen3_moe", target) for target in TARGETS)]
IDS = torch.arange(24)[None] % 96


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return {tree: save_tiny(tree, folder / tree) for tree in TREES}


@pytest.fixture(scope="module")
def block_fp8(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("block_fp8")
    return {tree: save_block_fp8(path, folder / tree) for tree, path in plain.items()}


def load(folder: Path, request: dict[str, Any] | None = None, **options: object) -> PreTrainedModel:
    given = {key: options.pop(key) for key in [*options] if key in ("dtype", "device_map", "offload_folder")}
    if request is not None:
        options.setdefault("write_report", False)
        given["quantization_config"] = QuantSpecConfig(request, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()


def weight_only(target: str) -> dict[str, Any]:
    return {"targets": {"*": {"weight": target, "activation": None}}, "ignore": KEPT}


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def held_matrices(model: PreTrainedModel) -> Iterator[tuple[str, QuantizedTensor]]:
    """Every matrix that the model holds quantized, under the name that its checkpoint has for it."""
    for name, module in model.named_modules():
        for attribute in getattr(module, "packed", {}):
            held = module.quantized(attribute)
            if len(held.shape) == 2:
                yield f"{name}.{attribute}", held
                continue
            parts = ("gate_proj", "up_proj") if attribute == "gate_up_proj" else ("down_proj",)
            scale_rows = held.scale.shape[1] // len(parts)
            rows = held.shape[1] // len(parts)
            for expert in range(held.shape[0]):
                second = None if held.second_scale is None else held.second_scale[expert]
                for i, part in enumerate(parts):
                    data = held.data[expert, i * rows : (i + 1) * rows]
                    scale = held.scale[expert, i * scale_rows : (i + 1) * scale_rows]
                    whole = QuantizedTensor(data, scale, held.key, (rows, held.shape[2]), second)
                    yield f"{name}.{expert}.{part}.weight", whole


@pytest.mark.parametrize("tree", TREES)
def test_every_weight_becomes_what_quantize_makes_of_it(plain: dict[str, Path], tree: str) -> None:
    model, source = load(plain[tree], MIXED), tensors_of(plain[tree])
    seen = set()
    for name, held in held_matrices(model):
        target = "mxfp4" if ".mlp." in name else "ptpc_fp8"
        wanted = quantize(source[name], target)
        assert same_bytes(held.data, wanted.data), name
        assert same_bytes(held.scale, wanted.scale), name
        seen.add(name)
    kept = {name for name in source if name not in seen}
    assert all("proj" not in name for name in kept)
    for name in kept:
        assert torch.equal(model.state_dict()[name], source[name]), name
    report = model.hf_quantizer.report
    assert {layer.layer for layer in report.kept} == {name.removesuffix(".weight") for name in kept if _is_layer(name)}
    assert sum(layer.weights for layer in report.layers) == len(seen) - _fused(report, seen)
    assert report.bytes_before - report.bytes_after == sum(
        each.bytes_before - each.bytes_after for each in report.layers
    )


def _is_layer(name: str) -> bool:
    return name.endswith(("gate.weight", "lm_head.weight"))


def _fused(report: QuantReport, seen: set[str]) -> int:
    """Gate and up of an expert are one matrix of the report."""
    return sum(".experts." in name and ".up_proj." in name for name in seen) if report.layers else 0


@pytest.mark.parametrize(("tree", "target"), CASES)
def test_it_computes_with_the_dequantized_weights(
    plain: dict[str, Path], tmp_path: Path, tree: str, target: str
) -> None:
    request = weight_only(target)
    source = tensors_of(plain[tree])
    model = load(plain[tree], request, dtype=torch.float32)
    values = {name: dequantize(held, torch.float32) for name, held in held_matrices(model)}
    save_file({**source, **values}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((plain[tree] / "config.json").read_text("utf-8"), "utf-8")
    wanted = logits(load(tmp_path, dtype=torch.float32))
    assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, logits(load(plain[tree], dtype=torch.float32)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tree", "target"), CASES)
def test_saved_and_read_again(plain: dict[str, Path], tmp_path: Path, tree: str, target: str) -> None:
    model = load(plain[tree], {"global_quant_config": target, "exclude_layer": ["lm_head"]})
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not same_bytes(first[name], second[name])] == []
    assert torch.equal(logits(model), logits(again))
    names = tensors_of(tmp_path).keys()
    assert not [name for name in names if "gate_up_proj" in name]  # experts one by one, as others write them
    with pytest.raises(LoadError, match="nothing was converted"):
        _ = again.hf_quantizer.report


@pytest.mark.parametrize("tree", TREES)
def test_block_fp8_is_requantized_with_its_fp32_scales(block_fp8: dict[str, Path], tmp_path: Path, tree: str) -> None:
    model, source = load(block_fp8[tree], MIXED), tensors_of(block_fp8[tree])
    count = 0
    for name, held in held_matrices(model):
        scale = source[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32
        target = "mxfp4" if ".mlp." in name else "ptpc_fp8"
        wanted = requantize(source[name], scale, source="fp8_e4m3/block_128x128", target=target)
        assert same_bytes(held.data, wanted.data), name
        assert same_bytes(held.scale, wanted.scale), name
        count += 1
    assert count == sum(name.endswith("_scale_inv") for name in source)
    assert {layer.source for layer in model.hf_quantizer.report.layers} == {"fp8_e4m3/block_128x128"}
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("tree", TREES)
def test_block_fp8_that_nothing_asks_for_keeps_its_codes(block_fp8: dict[str, Path], tmp_path: Path, tree: str) -> None:
    request = {"layer_quant_config": {"*.self_attn.*": "mxfp4"}}
    model, source = load(block_fp8[tree], request), tensors_of(block_fp8[tree])
    kept = 0
    for name, held in held_matrices(model):
        if ".self_attn." not in name:
            assert same_bytes(held.data, source[name]), name
            assert same_bytes(held.scale, source[f"{name}_scale_inv"]), name
            kept += 1
    assert kept
    kinds = {layer.layer: layer.source for layer in model.hf_quantizer.report.kept}
    assert kinds["lm_head"] == "bf16"
    assert kinds["model.layers.0.mlp.down_proj" if tree != "qwen3_moe" else "model.layers.0.mlp.experts"].startswith(
        "fp8"
    )
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_checkpoint_in_the_shape_of_compressed_tensors_is_read(plain: dict[str, Path], tmp_path: Path) -> None:
    request = {"global_quant_config": "ptpc_fp8", "exclude_layer": KEPT}
    for tree in ("llama", "qwen3_moe"):
        folder = tmp_path / tree
        quantize_checkpoint(plain[tree], request, folder, export_format="compressed-tensors", write_report=False)
        model = load(folder, {"layer_quant_config": {"*.self_attn.*": "mxfp8"}})
        stored = tensors_of(folder)
        for name, held in held_matrices(model):
            if ".self_attn." in name:
                wanted = requantize(
                    stored[name], stored[f"{name}_scale"], source="fp8_e4m3/per_channel", target="mxfp8"
                )
                assert same_bytes(held.data, wanted.data), name
            else:
                assert same_bytes(held.data, stored[name]), name


@pytest.mark.parametrize("tree", ["llama", "qwen3_moe"])
def test_an_offline_export_gives_the_same_values(plain: dict[str, Path], tmp_path: Path, tree: str) -> None:
    everywhere = weight_only({"llama": "mxfp4", "qwen3_moe": "ptpc_fp8"}[tree])
    online = load(plain[tree], everywhere, dtype=torch.float32)
    quantize_checkpoint(
        plain[tree], everywhere, tmp_path / "out", export_format="compressed-tensors", write_report=False
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    ).eval()
    # Their library stores fp32 scales and decoded 4-bit weights in bf16: a value may differ by half a bf16 step.
    assert torch.allclose(logits(online), logits(theirs), rtol=2e-2, atol=2e-3)


def test_activations_are_quantized_as_the_request_says(plain: dict[str, Path]) -> None:
    made = {
        word: load(plain["llama"], {"targets": {"*": {"weight": "ptpc_fp8", "activation": word}}}, dtype=torch.float32)
        for word in (None, "fp8_e4m3/per_token:dynamic")
    }
    alone, dynamic = made.values()
    assert alone.model.layers[0].mlp.down_proj.activation is None
    assert str(dynamic.model.layers[0].mlp.down_proj.activation) == "fp8_e4m3/per_token:dynamic"
    assert not torch.equal(logits(alone), logits(dynamic))
    by_default = load(plain["llama"], {"global_quant_config": "ptpc_fp8"}, dtype=torch.float32)
    assert torch.equal(logits(by_default), logits(dynamic))


def test_generation(plain: dict[str, Path]) -> None:
    for tree in TREES:
        model = load(plain[tree], MIXED)
        ids = IDS[:, 1:9]
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens.shape == (1, 12)
        assert torch.equal(tokens[0, 8], logits(model, ids)[0, -1].argmax())


def test_tied_heads_are_kept(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    model = load(folder, {"global_quant_config": "ptpc_fp8"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    (kept,) = model.hf_quantizer.report.kept
    assert kept.layer == "lm_head"
    assert "embed_tokens" in kept.reason


def test_the_report_is_written_and_says_what_was_done(plain: dict[str, Path], tmp_path: Path) -> None:
    model = load(plain["qwen3_moe"], MIXED, report_dir=tmp_path, write_report=True, measure=True)
    (path,) = tmp_path.glob("online_quant_info_*.json")
    document = json.loads(path.read_text("utf-8"))
    assert document["num_layers"] == len(model.hf_quantizer.report.layers) == 10
    assert document["online_quant_config"] == MIXED
    assert document["model"] == str(plain["qwen3_moe"])
    experts = next(layer for layer in model.hf_quantizer.report.layers if layer.layer.endswith("experts"))
    assert experts.weights == 8
    assert 15 < experts.sqnr_db < 25


def test_every_layer_is_told_apart_from_its_reason(plain: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model = load(
        plain["qwen3_moe"], {"global_quant_config": "ptpc_fp8", "exclude_layer": ["*.self_attn.*", "*.nothing"]}
    )
    assert re.search(r"router decides which\s+experts run", caplog.text)
    assert "'*.nothing' matches no module" in caplog.text
    assert type(model.model.layers[0].mlp.gate).__name__ == "DecodingQwen3MoeTopKRouter"
    assert isinstance(model.model.layers[0].mlp.experts, QuantizedExperts)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear)


def test_what_is_stored_is_what_a_model_in_memory_gets(plain: dict[str, Path]) -> None:
    config = QuantizationConfig.from_online(MIXED)
    model = load(plain["llama"], MIXED)
    for name, held in held_matrices(model):
        wanted = config.resolve(name.removesuffix(".weight")).weight_key
        assert wanted is not None
        assert held.key == wanted
        assert format_of_key(held.key) is not None
