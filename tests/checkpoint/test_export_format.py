"""Checkpoints in compressed-tensors' shape: its own library's decompression gives our dequantized values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig as TheirConfig
from compressed_tensors.utils.match import match_named_modules
from safetensors.torch import load_file
from torch import nn

from quant_kernels import dequantize, quantize
from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.folder import open_folder
from quant_spec import LoadError, NameRules, PlanError, QuantizationConfig
from quant_spec.formats import format_of_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Writer

Tensors = dict[str, torch.Tensor]
Models = dict[str, "Callable[..., Tensors]"]
MIXED = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4", "*.o_proj": "mxfp8", "*.v_proj": "per_block_fp8"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
REQUESTS: dict[str, dict[str, object]] = {
    word: {"global_quant_config": word, "exclude_layer": ["lm_head", "*.gate.*"]}
    for word in ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
} | {
    "mixed": MIXED,
    "weights alone": {"targets": {"*.layers.*": {"weight": "ptpc_fp8", "activation": None}}},
    "few layers": {"layer_quant_config": {"*.0.self_attn.q_proj": "mxfp4", "*.1.self_attn.o_proj": "ptpc_fp8"}},
}
FORMATS = {
    "ptpc_fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "per_block_fp8": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mixed": "mixed-precision",
    "weights alone": "naive-quantized",
    "few layers": "mixed-precision",
}


def written(folder: Path) -> tuple[dict[str, Any], Tensors]:
    document = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return document, tensors


def export(folder: Path, request: object, name: str = "out", **options: Any) -> Path:  # noqa: ANN401  (of the job)
    options.setdefault("export_format", "compressed-tensors")
    quantize_checkpoint(folder, request, folder.parent / name, write_report=False, **options)
    return folder.parent / name


def as_modules(source: Tensors) -> nn.Module:
    """A tree of Linear and other modules with the names of a checkpoint."""
    root = nn.Module()
    for name, tensor in source.items():
        module = root
        *path, leaf = name.removesuffix(".weight").split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        plain = tensor.dim() != 2 or "embed" in leaf
        rows, cols = (1, 1) if plain else tensor.shape
        module.add_module(leaf, nn.Module() if plain else nn.Linear(cols, rows, bias=False, device="meta"))
    return root


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_their_decompression_gives_our_values(write: Writer, models: Models, model: str, kind: str) -> None:
    source = models[model]()
    folder = write(source, shards=2)
    document, tensors = written(export(folder, REQUESTS[kind]))
    assert document["format"] == FORMATS[kind]
    theirs = TheirConfig(**{key: document[key] for key in ("config_groups", "ignore", "format")})
    ours = QuantizationConfig.from_dict(document)
    request = QuantizationConfig.from_online(REQUESTS[kind])
    tree, left = as_modules(source), dict(tensors)
    met: set[str] = set()
    # By rising precedence: the class first, expressions and names after it.
    groups = sorted(theirs.config_groups.values(), key=lambda scheme: "Linear" not in scheme.targets)
    for scheme in groups:
        for name, _ in match_named_modules(tree, scheme.targets, theirs.ignore):
            if "Linear" in scheme.targets and any(
                True
                for other in groups
                if other is not scheme
                for each, _ in match_named_modules(tree, other.targets, theirs.ignore)
                if each == name
            ):
                continue
            met.add(name)
            stored = {
                key.removeprefix(f"{name}."): left.pop(key) for key in list(left) if key.startswith(f"{name}.weight")
            }
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            weight = compressor.decompress(dict(stored), scheme)["weight"]
            key = request.resolve(name).weight_key
            assert str(ours.resolve(name).weight_key) == str(key)
            quantized = quantize(source[f"{name}.weight"], format_of_key(key))
            mine = dequantize(quantized, weight.dtype)
            if quantized.second_scale is None:
                assert torch.equal(weight, mine), name
            else:
                # They divide by the outer scale's reciprocal: a last place of fp32, which the rounding to bf16 makes
                # one of bf16 where a product falls between two values.
                torch.testing.assert_close(weight, mine, rtol=2**-7, atol=0)
                outer = stored["weight_global_scale"]
                scale = (stored["weight_scale"].float() / outer).repeat_interleave(16, -1)
                again = quantized.scale.float() * quantized.second_scale
                torch.testing.assert_close(scale, again.repeat_interleave(16, -1), rtol=2**-22, atol=0)
                assert torch.equal(stored["weight_packed"], quantized.data.view(torch.uint8))
    wanted = {
        name.removesuffix(".weight")
        for name, tensor in source.items()
        if tensor.dim() == 2 and "embed" not in name and request.resolve(name.removesuffix(".weight")).is_quantized
    }
    assert met == wanted
    assert all(torch.equal(tensor, source[name]) for name, tensor in left.items())


@pytest.mark.parametrize("kind", REQUESTS)
def test_both_shapes_hold_the_same_bytes(write: Writer, models: Models, kind: str) -> None:
    folder = write(models["qwen3_moe"](), shards=2)
    _, theirs = written(export(folder, REQUESTS[kind]))
    quark, tensors = written(export(folder, REQUESTS[kind], "quark", export_format="quark"))
    assert quark["quant_method"] == "quark"
    for name, tensor in tensors.items():
        if name.endswith("_scale_2"):
            divisor = theirs.pop(name.replace("_scale_2", "_global_scale"))
            assert torch.equal(divisor, tensor.reciprocal().reshape(1))
            continue
        found = theirs.pop(name, None)
        found = theirs.pop(f"{name}_packed") if found is None else found
        assert torch.equal(
            found.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )
    assert not theirs


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if kind != "nvfp4"])
def test_the_config_says_what_was_asked_for(write: Writer, models: Models, kind: str) -> None:
    source = models["qwen3_moe"]()
    document, _ = written(export(write(source, shards=2), REQUESTS[kind]))
    names = NameRules(tensors=source)
    found, asked = QuantizationConfig.from_dict(document, names=names), QuantizationConfig.from_online(REQUESTS[kind])
    containers = {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    for name in {name.removesuffix(".weight") for name, t in source.items() if t.dim() == 2} | containers:
        if "embed" in name:
            assert not found.resolve(name).is_quantized
            continue
        mine, theirs = found.resolve(name), asked.resolve(name)
        assert (str(mine.weight_key), str(mine.activation_key)) == (str(theirs.weight_key), str(theirs.activation_key))


def test_staged_activations_are_left_out_with_a_warning(write: Writer, models: Models) -> None:
    folder = write(models["llama"]())
    report = quantize_checkpoint(
        folder, REQUESTS["nvfp4"], folder.parent / "out", export_format="compressed-tensors", write_report=False
    )
    assert any("input_global_scale" in warning for warning in report.warnings)
    document, _ = written(folder.parent / "out")
    assert all(group["input_activations"] is None for group in document["config_groups"].values())


def test_a_zero_weight_has_an_outer_scale_of_one(write: Writer, models: Models) -> None:
    source = models["llama"]()
    name = "model.layers.0.mlp.up_proj.weight"
    source[name].zero_()
    _, tensors = written(export(write(source), REQUESTS["nvfp4"]))
    assert tensors[f"{name}_global_scale"].tolist() == [1.0]
    assert not tensors[f"{name}_packed"].any()


def test_stacked_experts_are_refused_with_the_shape_that_has_them(stacked_dir: Path) -> None:
    with pytest.raises(PlanError, match=r"experts\.(gate_up|down)_proj .* no stacked experts.*--export-format quark"):
        export(stacked_dir, {"global_quant_config": "ptpc_fp8"})
    assert not list(stacked_dir.parent.glob("out*"))


@pytest.mark.parametrize("word", ["quark ", "compressed_tensors", "", "gguf"])
def test_unknown_shape(llama_dir: Path, word: str) -> None:
    with pytest.raises(PlanError, match=r"export_format: found .*; allowed: quark, compressed-tensors"):
        export(llama_dir, MIXED, export_format=word)
    assert not list(llama_dir.parent.glob("out*"))


@pytest.mark.parametrize("word", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4"])
@pytest.mark.parametrize(("first", "second"), [("quark", "compressed-tensors"), ("compressed-tensors", "quark")])
def test_what_is_kept_takes_the_names_of_the_other_shape(
    write: Writer, models: Models, word: str, first: str, second: str
) -> None:
    folder = write(models["llama"](), torch_dtype="bfloat16")
    request = {"layer_quant_config": {"*.mlp.*": word}}
    one = export(folder, request, "one", export_format=first)
    more = {"layer_quant_config": {"*.q_proj": "ptpc_fp8"}}
    if word == "nvfp4":
        with pytest.raises(PlanError, match="layout does not have"):
            export(one, more, "two", export_format=second)
        return
    two = export(one, more, "two", export_format=second)
    direct = export(
        folder, {"layer_quant_config": {"*.mlp.*": word, "*.q_proj": "ptpc_fp8"}}, "direct", export_format=second
    )
    (document, tensors), (wanted, expected) = written(two), written(direct)
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in expected.items()
    }
    for name, tensor in expected.items():
        assert torch.equal(tensors[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    left, right = QuantizationConfig.from_dict(document), QuantizationConfig.from_dict(wanted)
    for name in open_folder(folder).tensors:
        module = name.removesuffix(".weight")
        assert str(left.resolve(module).weight_key) == str(right.resolve(module).weight_key)


def test_a_taken_name_is_refused(write: Writer) -> None:
    folder = write({"a.weight": torch.ones(4, 32), "a.weight_scale": torch.ones(4)})
    with pytest.raises(LoadError, match=r"also be stored as 'a\.weight_scale'"):
        export(folder, {"global_quant_config": "mxfp4"})
    assert not list(folder.parent.glob("out*"))
