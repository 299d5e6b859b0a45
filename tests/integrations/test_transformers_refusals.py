"""from_pretrained with what cannot work: clear errors, before anything is read where that is possible."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from tiny_checkpoints import KEPT, save_block_fp8, save_tiny, tensors_of  # noqa: E402

from quant_kernels.checks import NonFiniteError  # noqa: E402
from quant_kernels.integrations import transformers as ours  # noqa: E402
from quant_kernels.integrations.transformers import QuantSpecConfig  # noqa: E402
from quant_spec import ConfigError, LoadError, PlanError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.client
PTPC = {"global_quant_config": "ptpc_fp8", "exclude_layer": KEPT}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture(scope="module")
def block_fp8(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_block_fp8(llama, tmp_path_factory.mktemp("block") / "llama")


def load(folder: Path, request: object, **options: object) -> transformers.PreTrainedModel:
    device_map = options.pop("device_map", None)
    config = QuantSpecConfig(request, **{"write_report": False, **options})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device_map)


def changed(folder: Path, target: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """The checkpoint with other tensors and other keys in config.json; None takes a key out."""
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    document = {**json.loads((folder / "config.json").read_text("utf-8")), **config}
    document = {key: value for key, value in document.items() if value is not None}
    (target / "config.json").write_text(json.dumps(document), "utf-8")
    return target


@pytest.mark.parametrize(
    ("request_", "options", "said"),
    [
        ({"global_quant_config": "mxfp5"}, {}, "unknown format 'mxfp5'.*did you mean 'mxfp8'"),
        ({"global_quant": "mxfp4"}, {}, "did you mean 'global_quant_config'"),
        (PTPC, {"on_unsuported": "keep"}, r"unknown argument 'on_unsuported'.*did you mean 'on_unsupported'"),
        (
            PTPC,
            {"on_unmatched": "eror"},
            r"on_unmatched: found 'eror'; allowed: warn, error; did you mean 'error'",
        ),
        (PTPC, {"on_unsupported": "kep"}, "on_unsupported: found 'kep'; allowed: keep, error"),
        (PTPC, {"requantize_sources": ["mxfp6"]}, "requantize_sources: found 'mxfp6'"),
        (PTPC, {"quant_method": "fp8"}, "quant_method"),
        ("/nowhere/recipe.json", {}, "/nowhere/recipe.json"),
    ],
)
def test_bad_requests_are_refused_when_they_are_made(request_: object, options: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=said):
        QuantSpecConfig(request_, **options)


def test_a_request_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(PTPC), "utf-8")
    assert QuantSpecConfig(path) == QuantSpecConfig(str(path)) == QuantSpecConfig(PTPC)
    path.write_text("[1]", "utf-8")
    with pytest.raises(ConfigError, match="holds a list, no object"):
        QuantSpecConfig(path)


def test_entries_that_fit_nothing(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {**PTPC, "layer_quant_config": {"*.mpl.*": "mxfp4"}}
    with pytest.raises(PlanError, match=r"layer_quant_config\['\*.mpl.\*'\]"):
        load(llama, wrong, on_unmatched="error")
    load(llama, wrong)
    assert "'*.mpl.*' matches no module" in caplog.text


def test_a_request_that_changes_nothing(llama: Path) -> None:
    with pytest.raises(PlanError):
        load(llama, {"layer_quant_config": {"*.mpl.*": "mxfp4"}})


def test_layers_that_cannot_be_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny("llama", tmp_path / "odd", intermediate_size=200)
    request = {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"]}
    with pytest.raises(PlanError, match="down_proj"):
        load(folder, request, on_unsupported="error")
    model = load(folder, request)
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)
    assert "down_proj" in caplog.text


def test_cuda_that_is_not_there(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device_map in ("cuda", "cuda:1", {"": 0}, {"model": "cuda:0", "lm_head": "cpu"}):
        with pytest.raises(RuntimeError, match=r"device_map: found 'cuda.*torch sees no CUDA device"):
            load(llama, PTPC, device_map=device_map)


@pytest.mark.parametrize("found", ["4.57.1", "5.19.0", "6.0.0"])
def test_versions_without_the_hooks_are_refused(found: str) -> None:
    with pytest.raises(ImportError, match=f"found transformers {found}; allowed: >= 5.20, < 6"):
        ours.check_version(found)


def test_versions_that_nobody_tried_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ours.check_version("5.24.3")
    assert not caplog.records
    ours.check_version("5.25.0")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "5.25.0 is newer than 5.24" in caplog.text


def test_nan_is_named(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][7, 3] = float("nan")
    folder = changed(llama, tmp_path / "nan", tensors)
    with pytest.raises(NonFiniteError, match=name):
        load(folder, PTPC, write_report=True, report_dir=tmp_path)
    assert not list(tmp_path.glob("online_quant_info*"))
    load(folder, PTPC, check=False)


def test_weights_that_are_missing_are_named(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    folder = changed(llama, tmp_path / "missing", tensors)
    with pytest.raises(LoadError, match=r"1 weights of quantized layers are not in.*layers\.0\.mlp\.up_proj"):
        load(folder, PTPC)


def test_scales_that_are_missing_are_named(block_fp8: Path, tmp_path: Path) -> None:
    tensors = tensors_of(block_fp8)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    folder = changed(block_fp8, tmp_path / "missing", tensors)
    with pytest.raises(
        LoadError, match=r"layers\.0\.mlp\.up_proj\.weight: stored as torch.float8_e4m3fn, but its scales"
    ):
        load(folder, PTPC)


def test_codes_that_no_config_describes(block_fp8: Path, tmp_path: Path) -> None:
    folder = changed(block_fp8, tmp_path / "bare", tensors_of(block_fp8), quantization_config=None)
    with pytest.raises(LoadError, match="is F8_E4M3, but no config says how it is quantized"):
        load(folder, PTPC)
    source = json.loads((block_fp8 / "config.json").read_text("utf-8"))["quantization_config"]
    load(folder, PTPC, source=source)


def test_methods_that_cannot_be_converted(llama: Path, tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    folder = changed(llama, tmp_path / "gptq", tensors_of(llama), quantization_config=gptq)
    with pytest.raises(ConfigError, match="gptq"):
        load(folder, PTPC)


def test_a_second_request_over_a_converted_model(llama: Path, tmp_path: Path) -> None:
    load(llama, PTPC).save_pretrained(tmp_path)
    load(tmp_path, PTPC)
    with pytest.raises(ConfigError, match="quantized by another request already"):
        load(tmp_path, {"global_quant_config": "mxfp4"})


def test_saved_codes_that_are_missing(llama: Path, tmp_path: Path) -> None:
    load(llama, PTPC).save_pretrained(tmp_path / "whole")
    tensors = tensors_of(tmp_path / "whole")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    folder = changed(tmp_path / "whole", tmp_path / "part", tensors)
    with pytest.raises(LoadError, match=r"1 tensors of quantized layers are missing: .*up_proj\.weight_scale"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_blocks_across_the_seam_of_gate_and_up_cannot_be_saved(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "narrow", moe_intermediate_size=96)
    model = load(folder, {"global_quant_config": "per_block_fp8", "exclude_layer": KEPT})
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "out")


def test_other_methods_are_merged_as_ever(block_fp8: Path) -> None:
    with pytest.raises(ValueError, match="pass the same quantization config class"):
        transformers.AutoModelForCausalLM.from_pretrained(
            block_fp8, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)
        )


def test_registering_twice_does_nothing() -> None:
    ours.register()
    ours.register()
