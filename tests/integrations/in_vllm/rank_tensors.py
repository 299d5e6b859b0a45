"""What a rank holds of a model; a module of its own, so that vLLM's workers can import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def held(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return, for every module that has a vLLM method, the method's class, its tensors and its format."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        raw = {
            key: value.detach().contiguous().view(torch.uint8).clone()
            for key, value in tensors.items()
            if value is not None and value.dim() and key.startswith(("weight", "w13_weight", "w2_weight"))
        }
        found[name] = {"method": type(method).__name__, "tensors": raw, "type": module.__dict__.get("quant_type")}
    return found
