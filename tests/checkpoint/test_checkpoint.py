"""quantize_checkpoint: bytes, names, config, report, and a folder that is complete or not there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

from quant_kernels.loading import transfer
from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.shards import ShardWriter
from quant_kernels.reference import quantize_mxfp4, quantize_mxfp8, quantize_per_block_fp8, quantize_ptpc_fp8
from quant_spec import ConfigError, LoadError, PlanError, QuantizationConfig, ResolveError
from quant_spec.schema import schema_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Writer

    from quant_spec.report import QuantReport

Models = dict[str, "Callable[..., dict[str, torch.Tensor]]"]
RECIPE = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.*": "mxfp4"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
REFERENCE = {
    "fp8_e4m3/per_channel": quantize_ptpc_fp8,
    "mxfp4": quantize_mxfp4,
    "mxfp8": quantize_mxfp8,
    "fp8_e4m3/block_128x128": quantize_per_block_fp8,
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., QuantReport]:
    def runner(model: Path, request: object, **options: object) -> QuantReport:
        options.setdefault("report_dir", tmp_path / "reports")
        return quantize_checkpoint(model, request, tmp_path / "out", **options)  # type: ignore[arg-type]

    return runner


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def config_of(folder: Path) -> QuantizationConfig:
    return QuantizationConfig.from_dict(json.loads((folder / "config.json").read_text())["quantization_config"])


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def check_output(source: dict[str, torch.Tensor], folder: Path, *, rounding: str | None = None) -> dict[str, str]:
    """Compare every tensor with the plain-torch reference of the format that config.json says; return the formats."""
    written, config = tensors_of(folder), config_of(folder)
    formats = {}
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        key = config.resolve(module).weight_key if tensor.dim() > 1 and f"{name}_scale" in written else None
        if key is None:
            assert same_bytes(written.pop(name), tensor), name
            if tensor.dim() > 1:
                assert config.resolve(module).weight_key is None, name
            continue
        formats[module] = str(key)
        data, scale, _ = REFERENCE[str(key)](tensor, *([rounding] if "mxfp" in str(key) else []))
        stored = written.pop(f"{name}_scale")
        assert same_bytes(written.pop(name), data), name
        assert same_bytes(stored, scale), name
        if str(key) == "fp8_e4m3/per_channel":
            assert stored.dtype == torch.float32
            assert stored.shape == tensor.shape[:-1]
    assert not written
    return formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("step_bytes", [1, 300, 8 << 20])
def test_llama_equals_the_reference(
    write: Writer,
    run: Callable[..., QuantReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: Models,
    dtype: torch.dtype,
    step_bytes: int,
) -> None:
    monkeypatch.setattr(transfer, "STEP_BYTES", step_bytes)
    source = models["llama"](dtype)
    report = run(write(source), RECIPE)
    formats = check_output(source, tmp_path / "out")
    assert len(formats) == report.num_layers == 14
    assert formats["model.layers.0.mlp.up_proj"] == "mxfp4"
    assert formats["model.layers.0.self_attn.q_proj"] == "fp8_e4m3/per_channel"
    stored = tensors_of(tmp_path / "out")
    assert stored["model.layers.0.mlp.up_proj.weight"].shape == (128, 32)
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].shape == (128, 2)


@pytest.mark.parametrize("word", ["ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "stacked_moe"])
def test_every_format_reads_back(
    write: Writer,
    run: Callable[..., QuantReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: Models,
    word: str,
    model: str,
) -> None:
    monkeypatch.setattr(transfer, "STEP_BYTES", 5000)
    source = models[model]()
    run(write(source, shards=2), {"global_quant_config": word, "exclude_layer": ["lm_head", "*.gate.*"]})
    formats = check_output(source, tmp_path / "out")
    assert "lm_head" not in formats
    assert "model.layers.0.mlp.gate" not in formats
    assert len(set(formats.values())) == 1


def test_nvfp4_converts_whole_matrices(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models
) -> None:
    source = models["llama"]()
    run(write(source), {"layer_quant_config": {"*.up_proj": "nvfp4"}})
    stored, name = tensors_of(tmp_path / "out"), "model.layers.1.mlp.up_proj"
    from quant_kernels.reference import quantize_nvfp4

    data, scale, second = quantize_nvfp4(source[f"{name}.weight"])
    assert same_bytes(stored[f"{name}.weight"], data)
    assert same_bytes(stored[f"{name}.weight_scale"], scale)
    assert second is not None
    assert same_bytes(stored[f"{name}.weight_scale_2"], second)
    assert str(config_of(tmp_path / "out").resolve(name).weight_key) == "nvfp4"


@pytest.mark.parametrize("rounding", ["even", "floor", "rceil"])
def test_scale_rounding(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models, rounding: str
) -> None:
    source = models["llama"]()
    run(write(source), {"global_quant_config": "mxfp4"}, scale_rounding=rounding)
    check_output(source, tmp_path / "out", rounding=rounding)
    document = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert document["global_quant_config"]["weight"]["scale_calculation_mode"] == rounding


def test_scale_rounding_must_fit(llama_dir: Path, run: Callable[..., QuantReport]) -> None:
    with pytest.raises(PlanError, match="allowed: even, floor, rceil"):
        run(llama_dir, {"global_quant_config": "mxfp4"}, scale_rounding="nearest")
    with pytest.raises(PlanError, match="no layer becomes a format with power-of-two scales"):
        run(llama_dir, {"global_quant_config": "ptpc_fp8"}, scale_rounding="even")


def test_experts_of_two_formats(moe_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    report = run(moe_dir, {**RECIPE, "layer_quant_config": {"*.mlp.experts": "mxfp4"}})
    document = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert document["exclude"][:2] == ["lm_head", "model.embed_tokens"] or "lm_head" in document["exclude"]
    config = config_of(tmp_path / "out")
    for layer in range(2):
        assert str(config.resolve(f"model.layers.{layer}.mlp.experts").weight_key) == "mxfp4"
        assert str(config.resolve(f"model.layers.{layer}.mlp.experts.3.up_proj").weight_key) == "mxfp4"
        assert config.resolve(f"model.layers.{layer}.mlp.gate").weight_key is None
    assert sorted(layer.layer for layer in report.layers if layer.weights == 12) == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert "mlp.experts: 2 (from layer_quant_config: *.mlp.experts, mxfp4)" in report.summary()


def test_experts_that_disagree_are_refused(moe_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    with pytest.raises(ResolveError, match=r"model\.layers\.0\.mlp\.experts: its experts must have one format"):
        run(moe_dir, {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.down_proj": "mxfp4"}})
    assert not list(tmp_path.glob("out*"))


def test_experts_with_the_input_side_first_are_kept(
    write: Writer, run: Callable[..., QuantReport], models: Models
) -> None:
    source = {
        name: (t.transpose(1, 2).contiguous() if t.dim() == 3 else t) for name, t in models["stacked_moe"]().items()
    }
    report = run(write(source), {"global_quant_config": "ptpc_fp8"})
    kept = {layer.layer: layer.reason for layer in report.kept}
    assert "[expert, input, output]" in kept["model.layers.0.mlp.experts"]


def test_other_files_are_copied_and_config_is_replaced(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path
) -> None:
    (llama_dir / "1_Pooling").mkdir()
    (llama_dir / "1_Pooling" / "config.json").write_text('{"pool": 1}')
    (llama_dir / "pytorch_model.bin").write_bytes(b"old")
    (llama_dir / ".git").mkdir()
    (llama_dir / ".git" / "HEAD").write_text("x")
    run(llama_dir, RECIPE)
    out = tmp_path / "out"
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "quark"


def test_tied_head(write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models) -> None:
    source = models["llama"]()
    del source["lm_head.weight"]
    report = run(write(source, tie_word_embeddings=True), {**RECIPE, "exclude_layer": ["lm_head"]})
    assert report.warnings == ()
    assert config_of(tmp_path / "out").resolve("lm_head").weight_key is None


def test_tied_head_that_is_stored_is_kept(write: Writer, run: Callable[..., QuantReport], models: Models) -> None:
    report = run(write(models["llama"](), tie_word_embeddings=True), {"global_quant_config": "ptpc_fp8"})
    assert "tie_word_embeddings" in next(layer.reason for layer in report.kept if layer.layer == "lm_head")


def test_input_side_that_does_not_fit_is_kept_or_refused(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models
) -> None:
    source = models["llama"]() | {"model.layers.0.odd.weight": torch.ones(8, 48, dtype=torch.bfloat16)}
    folder = write(source)
    with pytest.raises(PlanError, match=r"model\.layers\.0\.odd: input side of 48"):
        run(folder, {"global_quant_config": "mxfp4"}, on_unsupported="error")
    assert not list(tmp_path.glob("out*"))
    report = run(folder, {"global_quant_config": "mxfp4"})
    (kept,) = report.kept
    assert kept.layer == "model.layers.0.odd"
    assert "not a multiple of 32" in kept.reason
    assert any("model.layers.0.odd" in warning for warning in report.warnings)
    check_output(source, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("word", ["ptpc_fp8", "mxfp4", "per_block_fp8"])
def test_bad_values_name_tensor_and_rows(
    write: Writer,
    run: Callable[..., QuantReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: Models,
    value: float,
    word: str,
) -> None:
    monkeypatch.setattr(transfer, "STEP_BYTES", 3000)
    source = models["llama"]()
    name = "model.layers.1.mlp.up_proj.weight"
    source[name][3, 5] = source[name][100, 63] = value
    with pytest.raises(LoadError) as caught:
        run(write(source), {"global_quant_config": word})
    kind = "NaN" if value != value else "Inf"  # noqa: PLR0124  (NaN differs from itself)
    for part in (repr(name), f"2 {kind}", "3, 100"):
        assert part in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_zero_rows_and_empty_weights(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models
) -> None:
    source = models["llama"]() | {"empty.weight": torch.zeros(0, 64, dtype=torch.bfloat16)}
    source["model.layers.0.mlp.up_proj.weight"][:3] = 0
    source["model.layers.0.self_attn.q_proj.weight"][:3] = -0.0
    run(write(source), RECIPE)
    check_output(source, tmp_path / "out")


def block_scaled(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale, _ = quantize_per_block_fp8(weight)
    return data, scale


@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_block_fp8_source_equals_dequantize_then_quantize(
    write: Writer,
    run: Callable[..., QuantReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: Models,
    step_bytes: int,
) -> None:
    monkeypatch.setattr(transfer, "STEP_BYTES", step_bytes)
    source = models["llama"]()
    plain: dict[str, torch.Tensor] = {}
    for name in [name for name in source if ".self_attn." in name or ".mlp." in name]:
        tall = torch.cat([source[name]] * 5)
        data, scale = block_scaled(tall)
        source[name], source[f"{name}_scale_inv"] = data, scale
        grid = scale.repeat_interleave(128, 0)[: tall.shape[0]].repeat_interleave(128, 1)[:, : tall.shape[1]]
        plain[name] = (data.float() * grid).bfloat16()
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = write(source, quantization_config=quantized, torch_dtype="bfloat16")
    report = run(folder, {**RECIPE, "exclude_layer": ["lm_head", "*.v_proj"]})
    stored, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    for name, weight in plain.items():
        if "v_proj" in name:
            assert same_bytes(stored[name], source[name])
            assert same_bytes(stored[f"{name}_scale"], source[f"{name}_scale_inv"])
            assert str(config.resolve(name.removesuffix(".weight")).weight_key) == "fp8_e4m3/block_128x128"
            continue
        data, scale, _ = (quantize_mxfp4 if ".mlp." in name else quantize_ptpc_fp8)(weight)
        assert same_bytes(stored[name], data), name
        assert same_bytes(stored[f"{name}_scale"], scale), name
    assert not [name for name in stored if name.endswith("_inv")]
    assert {layer.source for layer in report.layers} == {"fp8_e4m3/block_128x128"}


def per_channel_document(activation: dict[str, object]) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {**weights, **activation}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def test_compressed_tensors_source(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models
) -> None:
    source = models["llama"]()
    plain = {}
    for name in [name for name in source if ".self_attn." in name or ".mlp." in name]:
        data, scale, _ = quantize_ptpc_fp8(source[name])
        source[name], source[f"{name}_scale"] = data, scale.bfloat16()
        plain[name] = (data.float() * scale.bfloat16().float()).bfloat16()
    document = per_channel_document({"strategy": "token", "dynamic": True})
    run(write(source, quantization_config=document), {"layer_quant_config": {"*.mlp.*": "mxfp4"}})
    stored, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    for name, weight in plain.items():
        key = str(config.resolve(name.removesuffix(".weight")).weight_key)
        if ".mlp." in name:
            data, scale, _ = quantize_mxfp4(weight)
            assert key == "mxfp4"
            assert same_bytes(stored[name], data)
            assert same_bytes(stored[f"{name}_scale"], scale)
        else:
            assert key == "fp8_e4m3/per_channel"
            assert same_bytes(stored[name], source[name])
            assert stored[f"{name}_scale"].shape == weight.shape[:1]
            assert same_bytes(stored[f"{name}_scale"], source[f"{name}_scale"])


def test_stored_activation_scales_go_with_what_is_kept(
    write: Writer, run: Callable[..., QuantReport], tmp_path: Path, models: Models
) -> None:
    source = models["llama"]()
    for name in [name for name in source if ".self_attn." in name or ".mlp." in name]:
        scale = source[name].abs().amax().float() / 448
        source[f"{name}_scale"] = scale
        source[name] = (source[name].float() / scale).to(torch.float8_e4m3fn)
        source[name.replace(".weight", ".input_scale")] = torch.tensor(0.5)
    document = {"quant_method": "fp8", "activation_scheme": "static"}
    run(write(source, quantization_config=document), {"layer_quant_config": {"*.mlp.*": "mxfp4"}})
    stored, config = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.input_scale" not in stored
    assert "model.layers.0.self_attn.q_proj.input_scale" in stored
    assert str(config.resolve("model.layers.0.self_attn.q_proj").activation_key) == "fp8_e4m3/per_tensor:static"
    name = "model.layers.0.mlp.up_proj.weight"
    data, scale, _ = quantize_mxfp4((source[name].float() * source[f"{name}_scale"]).bfloat16())
    assert same_bytes(stored[name], data)
    assert same_bytes(stored[f"{name}_scale"], scale)


def test_static_activation_cannot_be_asked_for(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path
) -> None:
    request = {"targets": {"*.mlp.*": {"weight": "mxfp4", "activation": "fp8_per_tensor_static"}}}
    with pytest.raises(PlanError, match="its scale would have to be stored"):
        run(llama_dir, request)
    assert not list(tmp_path.glob("out*"))


def test_log_lines(llama_dir: Path, run: Callable[..., QuantReport], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quant_kernels"):
        report = run(llama_dir, RECIPE)
    lines = [record.getMessage() for record in caplog.records if record.name == "quant_kernels"]
    assert tuple(lines[-3:]) == report.log_lines()
    assert lines[-3].endswith("seconds, 14 layers online-quantized")
    assert "mlp.up_proj: 2 (from layer_quant_config: *.mlp.*, mxfp4)" in lines[-2]
    assert lines[-1] == f"Online quantization info saved to {report.saved_to}"


def test_quantized_source_that_config_json_hides_is_refused(write: Writer, run: Callable[..., QuantReport]) -> None:
    data, scale = block_scaled(torch.ones(128, 128))
    folder = write({"a.weight": data, "a.weight_scale_inv": scale})
    with pytest.raises(LoadError, match=r"'a\.weight' is stored as F8_E4M3, but config\.json has no"):
        run(folder, {"global_quant_config": "ptpc_fp8"})


def test_missing_source_scale_is_refused(write: Writer, run: Callable[..., QuantReport]) -> None:
    data, _ = block_scaled(torch.ones(128, 128))
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with pytest.raises(LoadError, match=r"a\.weight: stored as fp8_e4m3/block_128x128, but its scales are missing"):
        run(write({"a.weight": data}, quantization_config=quantized), {"global_quant_config": "ptpc_fp8"})


def test_output_quantized_again_is_refused_and_left(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path
) -> None:
    run(llama_dir, RECIPE)
    with pytest.raises(PlanError, match="changes none"):
        quantize_checkpoint(tmp_path / "out", RECIPE, tmp_path / "again", report_dir=tmp_path / "reports")
    assert not list(tmp_path.glob("again*"))


def test_no_quantizable_layer(write: Writer, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    folder = write({"embed_tokens.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)})
    with pytest.raises(LoadError, match=r"no layer that could be quantized.*embed_tokens \(embedding\), norm \(norm\)"):
        run(folder, RECIPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    "request_", [{}, None, {"exclude_layer": ["x"]}, {"layer_quant_config": {"*.nothing": "mxfp4"}}]
)
def test_nothing_would_change(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path, request_: object
) -> None:
    with pytest.raises(PlanError):
        run(llama_dir, request_)
    assert not list(tmp_path.glob("out*"))


def test_unmatched_patterns_are_reported_with_the_nearest_names(
    llama_dir: Path, run: Callable[..., QuantReport]
) -> None:
    report = run(llama_dir, {"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_heed", "*.upp_proj"]})
    assert [(entry.entry, entry.path, entry.nearest[:1]) for entry in report.unmatched] == [
        ("lm_heed", "$.exclude_layer[0]", ("lm_head",)),
        ("*.upp_proj", "$.exclude_layer[1]", ("*.up_proj",)),
    ]
    assert sum("matches no module" in warning for warning in report.warnings) == 2
    assert any("lm_head: about to be quantized" in warning for warning in report.warnings)


def test_bad_request_names_the_place(llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\$\.global_quant_config: unknown format 'mxfp5'.*did you mean 'mxfp[48]'"):
        run(llama_dir, {"global_quant_config": "mxfp5"})
    assert not list(tmp_path.glob("out*"))


def test_existing_output_is_left_alone(llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(LoadError, match="the output folder exists"):
        run(llama_dir, RECIPE)
    assert (tmp_path / "out" / "mine").read_text() == "mine"
    assert not (tmp_path / "out.partial").exists()


def test_output_within_the_source_is_refused(llama_dir: Path) -> None:
    with pytest.raises(LoadError, match="lies within the source"):
        quantize_checkpoint(llama_dir, RECIPE, llama_dir / "quantized")
    assert sorted(path.name for path in llama_dir.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_foreign_partial_folder_is_left_alone(llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("mine")
    with pytest.raises(LoadError, match=r"out\.partial: left by another job"):
        run(llama_dir, RECIPE)
    assert (tmp_path / "out.partial" / "mine").read_text() == "mine"


class StopAfter:
    """Progress that interrupts the job after some bytes."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def start(self, total: int) -> None:
        assert total > self.left

    def advance(self, nbytes: int, name: str) -> None:
        assert name
        self.left -= nbytes
        if self.left < 0:
            raise KeyboardInterrupt


def test_interruption_leaves_the_partial_folder_and_is_taken_up(
    moe_dir: Path,
    run: Callable[..., QuantReport],
    tmp_path: Path,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = sum(tensor.nbytes for tensor in models["qwen3_moe"]().values())
    with pytest.raises(KeyboardInterrupt):
        run(moe_dir, RECIPE, progress=StopAfter(size // 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe", "out.partial"]
    done = sorted(path.name for path in (tmp_path / "out.partial" / "files").glob("*.safetensors"))
    assert done == ["model-00001-of-00003.safetensors"]
    written: list[str] = []
    real = ShardWriter._write
    monkeypatch.setattr(
        ShardWriter,
        "_write",
        lambda self, steps, layout, *rest: written.append(layout.file) or real(self, steps, layout, *rest),
    )
    report = run(moe_dir, RECIPE)
    assert written == ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    assert any("1 of 3 files were complete already" in warning for warning in report.warnings)
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "out").glob(".*"))
    check_output(models["qwen3_moe"](), tmp_path / "out")


def test_interrupted_job_is_not_taken_up_by_another_request(moe_dir: Path, run: Callable[..., QuantReport]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(moe_dir, RECIPE, progress=StopAfter(1000))
    with pytest.raises(LoadError, match="left by another job"):
        run(moe_dir, {"global_quant_config": "mxfp4"})


def test_full_disk_is_refused_before_anything_is_written(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(LoadError, match="bytes are needed, 10 are free"):
        run(llama_dir, RECIPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_write_error_leaves_nothing(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(LoadError, match="No space left on device"):
        run(llama_dir, RECIPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_source_that_shrinks_while_it_is_read(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(LoadError, match=r"model\.safetensors: the file ends at byte"):
        run(llama_dir, RECIPE)
    assert not list(tmp_path.glob("out*"))


def test_report(llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path) -> None:
    report = run(llama_dir, RECIPE, measure=True)
    assert report.saved_to is not None
    assert report.saved_to.parent == tmp_path / "reports"
    document = json.loads(report.saved_to.read_text())
    assert document == report.to_dict()
    Draft202012Validator(schema_for("report")).validate(document)
    assert document["online_quant_config"] == RECIPE
    assert document["num_layers"] == len(document["layers"]) == 14
    by_name = {layer["layer"]: layer for layer in document["layers"]}
    up = by_name["model.layers.0.mlp.up_proj"]
    assert (up["quant_type"], up["quant_dtype"], up["source"], up["target"]) == (
        "per_1x32",
        "torch.uint8",
        "bf16",
        "mxfp4",
    )
    assert up["rule"] == {
        "why": "pattern",
        "entry": "*.mlp.*",
        "path": "$.layer_quant_config['*.mlp.*']",
        "value": "mxfp4",
    }
    assert (up["bytes_before"], up["bytes_after"]) == (128 * 64 * 2, 128 * 32 + 128 * 2)
    assert 15 < up["sqnr_db"] < 25
    query = by_name["model.layers.0.self_attn.q_proj"]
    assert (query["quant_type"], query["quant_dtype"]) == ("per_Token", "torch.float8_e4m3fn")
    assert (query["rule"]["path"], query["rule"]["value"]) == ("$.global_quant_config", "ptpc_fp8")
    assert query["sqnr_db"] > 28
    (head,) = document["kept"]
    assert (head["layer"], head["reason"], head["rule"]["path"]) == ("lm_head", "excluded", "$.exclude_layer[0]")
    files = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert document["totals"]["bytes_after"] == files


def test_report_folder_that_cannot_be_is_refused_first(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="is no folder"):
        run(llama_dir, RECIPE, report_dir=tmp_path / "file" / "below")
    assert not list(tmp_path.glob("out*"))


def test_scale_name_that_is_taken(write: Writer, run: Callable[..., QuantReport]) -> None:
    folder = write({"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4)})
    with pytest.raises(LoadError, match=r"'a\.weight_scale', which the checkpoint already has"):
        run(folder, {"global_quant_config": "ptpc_fp8"})


def test_file_is_aligned_and_the_library_reads_it(
    llama_dir: Path, run: Callable[..., QuantReport], tmp_path: Path
) -> None:
    run(llama_dir, RECIPE)
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    sizes = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())
    save_file(load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "copy.safetensors")
