"""Configs and tensor listings that AMD Quark and compressed-tensors wrote for tiny models, and what vLLM asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "fixtures"
SCALE = "weight_scale"


@dataclass(frozen=True)
class Tensor:
    """Dtype as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]


def checkpoints() -> list[str]:
    """Names of the checkpoints, as `quark/llama-mxfp4`."""
    found = (path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.config.json"))
    return sorted(name.removesuffix(".config.json") for name in found)


def quantization_config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.config.json").read_text("utf-8"))["quantization_config"]


def tensors(name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for line in (FOLDER / f"{name}.tensors.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            tensor, dtype, shape = line.split("\t")
            found[tensor] = Tensor(dtype, tuple(json.loads(shape)))
    return found


def weights(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weight of each module: its own name is the tensor's, without the last part if that says `weight`."""
    found: dict[str, Tensor] = {}
    for tensor, value in stored.items():
        owner, _, last = tensor.rpartition(".")
        if last in {"weight", "weight_packed"}:
            found[owner] = value
        elif last != SCALE:
            found[tensor] = value
    return found


def stored_word(weight: Tensor, scale: Tensor | None) -> str:
    """The format that dtypes and shapes alone show, in the vocabulary of the cases."""
    if weight.dtype in {"BF16", "F32"} and scale is None:
        return "none"
    assert scale is not None, f"{weight} has no scale"
    rows, cols = weight.shape
    if scale.dtype == "U8":
        word = {"U8": "mxfp4", "F8_E4M3": "mxfp8"}[weight.dtype]
        assert scale.shape == (rows, cols * (2 if word == "mxfp4" else 1) // 32)
        return word
    assert weight.dtype == "F8_E4M3"
    if scale.shape in {(rows,), (rows, 1)} and rows > 1:
        return "fp8_e4m3/per_channel"
    assert scale.shape == (-(-rows // 128), -(-cols // 128))
    return "fp8_e4m3/block_128x128"


def prefixes(model: str) -> list[tuple[str, str]]:
    """(layer class, prefix) of every layer that vLLM asks a quantization method for."""
    found: list[tuple[str, str]] = []
    for line in (FOLDER / "vllm-prefixes" / f"{model}.txt").read_text("utf-8").splitlines():
        hook, *fields = line.split("\t")
        if hook == "get_quant_method":
            found.append((fields[0], fields[1] if len(fields) > 1 else ""))
    return found


def packed_modules(model: str) -> dict[str, list[str]]:
    for line in (FOLDER / "vllm-prefixes" / f"{model}.txt").read_text("utf-8").splitlines():
        hook, *fields = line.split("\t")
        if hook == "packed_modules_mapping":
            return json.loads(fields[0])
    message = f"{model}: no packed_modules_mapping"
    raise AssertionError(message)
