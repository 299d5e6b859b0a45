"""Load a quantized checkpoint into the transformers model, dequantized.

Nothing here knows the recipe: what each tensor holds is read from the `quantization_config`
that the checkpoint carries, as any engine would.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import AutoConfig

from quant_kernels import QuantizedTensor, dequantize
from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

    from quant_spec import QuantKey

SCALE = "_scale"


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder by name, one file or several."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def unpacked(key: QuantKey, data: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    """A stored weight with its scale, in the shapes and dtypes of the library.

    Args:
        key: what the weight was quantized to.
        data: codes as stored: float8_e4m3fn [N, K], or uint8 [N, K / 2] with two codes a byte.
        scale: as stored: [N] for one a row, uint8 [N, K / 32] for exponents of blocks.

    Returns:
        The same bytes as a `QuantizedTensor`.
    """
    rows, columns = data.shape
    if data.dtype == torch.uint8:
        data, columns = data.view(torch.float4_e2m1fn_x2), 2 * columns
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.view(rows, -1)
    return QuantizedTensor(data=data, scale=scale, key=key, shape=(rows, columns))


def dequantized(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a checkpoint by name, quantized ones as `dtype`, the others as stored."""
    document = json.loads((folder / "config.json").read_text("utf-8"))
    config = QuantizationConfig.from_dict(document["quantization_config"])
    tensors = stored_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            yield name, tensor
            continue
        key = config.resolve(name.removesuffix(".weight")).weight_key
        if key is None:
            msg = f"{name} has a scale, but the checkpoint's config says that it is not quantized"
            raise ValueError(msg)
        yield name, dequantize(unpacked(key, tensor, scale), dtype)


def load_dequantized(folder: Path, model_class: type[AutoModel | AutoModelForCausalLM]) -> PreTrainedModel:
    """The transformers model of a quantized checkpoint, with dequantized weights.

    Args:
        folder: what `quant-spec quantize` wrote.
        model_class: the automatic class that the original is loaded with.

    Returns:
        The model, in the checkpoint's own dtype.

    Raises:
        ValueError: the folder's tensors and its config.json contradict each other.
    """
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    dtype = config.dtype or torch.float32
    model: PreTrainedModel = model_class.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(dict(dequantized(folder, dtype)), strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if lost := set(missing) - tied:
        msg = f"{folder} lacks {sorted(lost)}"
        raise ValueError(msg)
    # Buffers that older versions of transformers saved, and that models now make themselves.
    if strangers := [name for name in unexpected if not name.endswith("position_ids")]:
        msg = f"{folder} holds tensors the model has no place for: {sorted(strangers)}"
        raise ValueError(msg)
    model.tie_weights()
    model.eval()
    return model
