"""The written tensors against the listings that AMD Quark's file-to-file export left for the same tiny models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.folder import open_folder
from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Writer

REQUESTS: dict[str, dict[str, object]] = {
    "llama-ptpc-f2f": {"global_quant_config": "ptpc_fp8"},
    "llama-mxfp4-f2f": {"global_quant_config": "mxfp4"},
    "llama-mixed-f2f": {"global_quant_config": "mxfp4", "layer_quant_config": {"*self_attn*": "ptpc_fp8"}},
    "qwen3moe-ptpc-f2f": {"global_quant_config": "ptpc_fp8"},
    "qwen3moe-mxfp4-f2f": {"global_quant_config": "mxfp4"},
    "qwen3moe-mixed-f2f": {"global_quant_config": "mxfp4", "layer_quant_config": {"*self_attn*": "ptpc_fp8"}},
    "deepseekv3-mixed-f2f": {"global_quant_config": "mxfp4", "layer_quant_config": {"*self_attn*": "ptpc_fp8"}},
}
Listing = dict[str, tuple[str, tuple[int, ...]]]


def read_listing(path: Path) -> Listing:
    """Tensor name -> dtype and shape, of all files of an export."""
    found: Listing = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, dtype, shape = line.split("\t")
            found[name] = (dtype, tuple(json.loads(shape)))
    return found


def source_of(listing: Listing) -> dict[str, torch.Tensor]:
    """Random weights of the model before it was quantized."""
    found = {}
    for name, (dtype, shape) in listing.items():
        if name.endswith("_scale"):
            continue
        plain = (*shape[:-1], shape[-1] * 2) if dtype == "U8" else shape
        kind = torch.float32 if dtype == "F32" else torch.bfloat16
        found[name] = torch.randn(plain, generator=torch.Generator().manual_seed(len(found))).to(kind)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_names_dtypes_and_shapes_are_those_of_quark(write: Writer, tmp_path: Path, root: Path, name: str) -> None:
    fixtures = root / "tests" / "data" / "fixtures" / "quark"
    theirs = read_listing(fixtures / f"{name}.tensors.txt")
    config = json.loads((fixtures / f"{name}.config.json").read_text())
    excluded = config["quantization_config"]["exclude"]
    request = {**REQUESTS[name], "exclude_layer": excluded}
    output = tmp_path / "out"
    quantize_checkpoint(write(source_of(theirs)), request, output, report_dir=tmp_path / "reports")
    ours = {tensor.name: (tensor.dtype, tensor.shape) for tensor in open_folder(output).tensors.values()}
    assert ours == theirs

    written = json.loads((output / "config.json").read_text())["quantization_config"]
    assert written.keys() == config["quantization_config"].keys()
    mine, quark = (QuantizationConfig.from_dict(each) for each in (written, config["quantization_config"]))
    for tensor in theirs:
        if tensor.endswith(".weight") and f"{tensor}_scale" in theirs:
            module = tensor.removesuffix(".weight")
            assert str(mine.resolve(module)) == str(quark.resolve(module))
    assert set(excluded) <= set(written["exclude"])
    for part in ("weight", "input_tensors"):
        assert written["global_quant_config"][part] == config["quantization_config"]["global_quant_config"][part]
    assert written["layer_quant_config"].keys() == config["quantization_config"]["layer_quant_config"].keys()
