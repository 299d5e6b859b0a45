"""Recorded hook calls of a real engine (tests/data/vllm-prefixes), played back on modules of the recorded shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER: Final = Path(__file__).resolve().parents[1] / "data" / "vllm-prefixes"
MODELS: Final = ("llama", "qwen3moe", "deepseekv3")


@attrs.frozen
class Call:
    """One recorded call."""

    hook: str
    arguments: tuple[str, ...]

    def json(self, index: int) -> object:
        """Return an argument that is JSON text."""
        return json.loads(self.arguments[index])


def calls(model: str) -> Iterator[Call]:
    """Yield the recorded calls in their order."""
    for line in (FOLDER / f"{model}.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            hook, *arguments = line.split("\t")
            yield Call(hook, tuple(arguments))


def module_of(class_name: str) -> nn.Module:
    """Return an empty module of a class of that name."""
    return type(class_name, (nn.Module,), {})()


def create(module: nn.Module, call: Call) -> None:
    """Give a module the weights that the recorded call created, without values."""
    if call.hook == "create_weights":
        _, _, inputs, outputs = call.arguments[:4]
        module.output_partition_sizes = json.loads(outputs)
        _parameter(module, "weight", (sum(json.loads(outputs)), int(inputs)))
    else:
        experts, hidden, inner = (int(each) for each in call.arguments[1:4])
        _parameter(module, "w13_weight", (experts, 2 * inner, hidden))
        _parameter(module, "w2_weight", (experts, hidden, inner))


def fill(module: nn.Module, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Load random values into a module's weights, as a loader does; return them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        values = torch.randn(parameter.shape, generator=generator).to(device)
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
        found[name] = values.clone()
    return found


def _parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
