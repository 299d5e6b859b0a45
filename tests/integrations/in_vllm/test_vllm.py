"""vLLM's CPU build loads and runs models through the plug-in, by one process and by two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import expected
import pytest
import tiny_models
import torch

HERE: Final = Path(__file__).parent
REQUEST: Final = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.experts*": "mxfp4", "*.mlp.gate_up_proj": "mxfp4"},
    "exclude_layer": ["lm_head", "*.mlp.gate"],
}
UNMATCHED: Final = {
    "llama": {"*.mlp.experts*", "*.mlp.gate"},
    "qwen3moe": {"*.mlp.gate_up_proj"},  # all its blocks have experts
    "deepseekv3": {"*.mlp.gate"},  # vLLM never asks about this model's router
}


def overrides(request: object) -> dict[str, object]:
    """Return the option that carries a request."""
    return {"hf_overrides": {"quantization_config_dict_json": json.dumps(request)}}


def start(
    model: Path, folder: Path, *, tp: int = 1, **options: object
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the engine; return how it ended and the file that it wrote."""
    arguments = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "quantization": "quant_spec",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "tensor_parallel_size": tp,
        **options,
    }
    saved = folder / "held.pt"
    environment = {**os.environ, "QUANT_SPEC_REPORT_DIR": str(folder), "PYTHONPATH": str(HERE)}
    if tp == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # saves a process to start
    else:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tp))
    command = [sys.executable, str(HERE / "run_engine.py"), json.dumps(arguments), str(saved)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    return done, saved


def run(model: Path, folder: Path, *, tp: int = 1, **options: object) -> dict[str, object]:
    """Return what the ranks hold and what was generated; the engine must come up."""
    done, saved = start(model, folder, tp=tp, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return torch.load(saved)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_models.MODELS:
        tiny_models.make(name, folder)
    return folder


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_ranks_hold_the_shards_of_the_whole(models: Path, tmp_path: Path, name: str, tp: int) -> None:
    """Codes and scales of every rank, byte by byte; the report, of all ranks, by rank 0."""
    found = run(models / name, tmp_path, tp=tp, **overrides(REQUEST))
    tensors = expected.checkpoint_tensors(models / name)
    seen = set()
    assert len(found["ranks"]) == tp
    for rank, modules in enumerate(found["ranks"]):
        for module, held in modules.items():
            if not held["method"].startswith("Converted"):
                continue
            container = module.removesuffix(".routed_experts")
            if container.endswith(".experts"):
                wanted = expected.expert_bytes(container, tensors, "mxfp4", rank, tp)
            else:
                target = "mxfp4" if module.endswith(".mlp.gate_up_proj") else "ptpc_fp8"
                wanted = expected.linear_bytes(expected.shards_of(module, tensors), module, target, rank, tp)
            for key, value in wanted.items():
                assert torch.equal(held["tensors"][key], value), f"rank {rank}: {module}.{key}"
            seen.add(container)
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("online_quant_info_*.json"))
    assert {layer["layer"] for layer in report["layers"]} == seen
    assert report["loading"]["ranks"] == tp
    assert {each["entry"] for each in report["unmatched"]} == UNMATCHED[name]
    kept = {layer["layer"]: layer["reason"] for layer in report["kept"]}
    assert kept["lm_head"] == "excluded"
    assert len(found["tokens"]) == 4


@pytest.mark.parametrize("tp", [1, 2])
def test_block_fp8_is_converted_from_its_codes(models: Path, tmp_path: Path, tp: int) -> None:
    """As DeepSeek-R1: attention to PTPC, dense layers as they are stored, both from FP8 in blocks."""
    folder = tiny_models.make_block_fp8(models)
    found = run(folder, tmp_path, tp=tp, **overrides({"layer_quant_config": {"*.self_attn.*": "ptpc_fp8"}}))
    stored = expected.checkpoint_tensors(folder)
    tensors = expected.decoded(stored)
    for rank, modules in enumerate(found["ranks"]):
        for module, held in modules.items():
            if not held["method"].startswith("Converted"):
                continue
            shards = expected.shards_of(module, tensors)
            if ".self_attn." in module:
                wanted = expected.linear_bytes(shards, module, "ptpc_fp8", rank, tp)
            else:
                codes = torch.cat(expected.shards_of(module, stored)).view(torch.uint8)
                rows = [shard.shape[0] for shard in shards]
                cut = expected.CUT[module.rpartition(".")[2]]
                wanted = {"weight": expected.piece(codes, rows, cut, rank, tp)}
            for key, value in wanted.items():
                assert torch.equal(held["tensors"][key], value), f"rank {rank}: {module}.{key}"
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("online_quant_info_*.json"))
    assert {each["source"] for each in report["layers"]} == {"fp8_e4m3/block_128x128"}


def test_a_targets_request_through_vllms_own_option(models: Path, tmp_path: Path) -> None:
    given = {"targets": {"*.mlp.*": "mxfp8"}, "ignore": ["*.down_proj"]}
    found = run(models / "llama", tmp_path, quantization_config=given)
    types = {module: held["type"] for module, held in found["ranks"][0].items()}
    assert types["model.layers.0.mlp.gate_up_proj"] == "per_1x32"
    assert types["model.layers.0.mlp.down_proj"] is None
    assert types["model.layers.0.self_attn.qkv_proj"] is None


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"global_quant_config": "mxfp5"}, "mxfp4"),
        ({"global_quant_confg": "mxfp4"}, "global_quant_config"),
        ({"layer_quant_config": {"*.self_atn.*": "mxfp4"}}, "self_atn"),
        ({"layer_quant_config": {"*.q_proj": "mxfp4", "*.k_proj": "mxfp8", "*.v_proj": "mxfp4"}}, "qkv_proj"),
    ],
    ids=["unknown format", "unknown key", "matches nothing", "shards disagree"],
)
def test_a_bad_request_stops_the_engine_and_says_why(
    models: Path, tmp_path: Path, request_: dict[str, object], said: str
) -> None:
    done, saved = start(models / "llama", tmp_path, **overrides(request_))
    assert done.returncode != 0
    assert not saved.exists()
    assert said in done.stdout + done.stderr


def test_no_request_is_refused(models: Path, tmp_path: Path) -> None:
    done, _ = start(models / "llama", tmp_path)
    assert done.returncode != 0
    assert "quantization_config_dict_json" in done.stdout + done.stderr


def test_smollm2(tmp_path: Path) -> None:
    """A real model: 120 fused layers; its three key heads allow no second rank."""
    folder = HERE.parents[2] / "build" / "demo" / "SmolLM2-135M-Instruct"
    assert (folder / "config.json").exists(), "setup.sh makes it"
    found = run(folder, tmp_path, **overrides({"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head"]}))
    tensors = expected.checkpoint_tensors(folder)
    modules = {name: held for name, held in found["ranks"][0].items() if held["method"] == "ConvertedLinear"}
    assert len(modules) == 4 * 30
    for module, held in modules.items():
        shards = [shard.float() for shard in expected.shards_of(module, tensors)]  # vLLM loads them as float32
        for key, value in expected.linear_bytes(shards, module, "ptpc_fp8", 0, 1).items():
            assert torch.equal(held["tensors"][key], value), f"{module}.{key}"
