"""What the tests of the command line call, and a checkpoint small enough to be written for each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

RECIPE: Final = (
    '{"global_quant_config":"ptpc_fp8","layer_quant_config":{"*.mlp.*":"mxfp4"},"exclude_layer":["lm_head"]}'
)
REQUEST: Final = "--online-quant-config"
PROGRAM: Final = (str(Path(sys.executable).with_name("quant-spec")),)


class Shell(Protocol):
    """Runs a line of bash in which `quant-spec` is the command line; returns what the process printed."""

    def __call__(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]: ...


def tensors(*, head: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of a model of one layer; `head`: with an output head of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (96, 64),
        "model.norm": (64,),
        "model.layers.0.input_layernorm": (64,),
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.0.mlp.up_proj": (128, 64),
        "model.layers.0.mlp.down_proj": (64, 128),
        **({"lm_head": (96, 64)} if head else {}),
    }
    return {f"{name}.weight": torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}


def write_model(folder: Path, found: Mapping[str, torch.Tensor], **config: object) -> Path:
    """Write a checkpoint folder; keywords go into config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **config}))
    save_file(dict(found), folder / "model.safetensors", {"format": "pt"})
    return folder
