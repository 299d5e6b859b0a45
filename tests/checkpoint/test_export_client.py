"""Checkpoints in compressed-tensors' shape, loaded by transformers as a format of its own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant_kernels import dequantize, quantize
from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_spec import QuantizationConfig
from quant_spec.formats import format_of_key

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.client

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 96,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
KEPT = {"exclude_layer": ["lm_head", "*.gate.*"]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama and a tiny Qwen3-MoE as transformers saves them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "qwen3_moe": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)),
    }
    for name, model in made.items():
        model.to(torch.bfloat16).save_pretrained(folder / name)
    return {name: folder / name for name in made}


def dequantized(folder: Path, request: object, target: Path, dtype: torch.dtype) -> Path:
    """The checkpoint with every weight quantized and dequantized, unquantized for those who read it."""
    config = QuantizationConfig.from_online(request)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        key = None
        if tensor.dim() == 2 and "embed" not in name:
            key = config.resolve(name.removesuffix(".weight")).weight_key
        tensors[name] = tensor if key is None else dequantize(quantize(tensor, format_of_key(key)), dtype)
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def logits(folder: Path, dtype: torch.dtype, **options: object) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.no_grad():
        found = model(torch.arange(40)[None]).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    ("model", "request_"),
    [
        ("llama", {"global_quant_config": "ptpc_fp8"}),
        ("llama", {"global_quant_config": "mxfp8"}),
        ("llama", {"global_quant_config": "per_block_fp8"}),
        ("qwen3_moe", {"global_quant_config": "mxfp4"}),
        ("qwen3_moe", {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4"}}),
    ],
)
def test_loaded_and_dequantized(
    checkpoints: dict[str, Path], tmp_path: Path, model: str, request_: dict[str, object]
) -> None:
    request = {**request_, **KEPT}
    folder = checkpoints[model]
    quantize_checkpoint(folder, request, tmp_path / "out", export_format="compressed-tensors", write_report=False)
    plain = logits(dequantized(folder, request, tmp_path / "plain", torch.bfloat16), torch.bfloat16)
    options = transformers.CompressedTensorsConfig(dequantize=True)
    assert torch.equal(logits(tmp_path / "out", torch.bfloat16, quantization_config=options), plain)
    assert not torch.equal(logits(folder, torch.bfloat16), plain)


@pytest.mark.parametrize(
    ("mlp", "attention", "dtype"),
    # In bf16 they round fp32 scales, and 4-bit weights come back as bf16 whatever the model's dtype is.
    [("per_block_fp8", "ptpc_fp8", torch.float32), ("mxfp4", "mxfp8", torch.bfloat16)],
)
def test_loaded_as_it_is(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mlp: str,
    attention: str,
    dtype: torch.dtype,
) -> None:
    # Weights alone: with activations, their linear layers quantize those too.
    request = {
        "targets": {
            "*.mlp.*": {"weight": mlp, "activation": None},
            "*.self_attn.*": {"weight": attention, "activation": None},
        }
    }
    folder = checkpoints["llama"]
    quantize_checkpoint(folder, request, tmp_path / "out", export_format="compressed-tensors", write_report=False)
    plain = logits(dequantized(folder, request, tmp_path / "plain", dtype), dtype)
    assert torch.equal(logits(tmp_path / "out", dtype), plain)
    assert "Could not match" not in caplog.text
