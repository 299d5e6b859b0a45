"""How a checkpoint says that it is quantized: the object, and what its parser may ask of config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.loading.folder import CONFIG_NAME, MODELOPT_NAME, read_object
from quant_spec import LoadError, NameRules, QuantizationConfig
from quant_spec.errors import shown
from quant_spec.parsers.base import ModelFacts

if TYPE_CHECKING:
    from quant_kernels.loading.folder import CheckpointFolder

OBJECT_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json that hold the object, the first that is there counts."""
NESTED_KEYS: Final = ("text_config",)
"""Keys of config.json below which the object may stand instead."""
_DTYPE_WORDS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@attrs.frozen
class SourceObject:
    """The quantization object of a checkpoint.

    Attributes:
        document: the object; None: the checkpoint is unquantized.
        path: keys of config.json that lead to it; empty for a file of its own.
        file: the file that holds it.
    """

    document: Mapping[str, object] | None
    path: tuple[str, ...]
    file: str = CONFIG_NAME


def find_source_object(folder: CheckpointFolder) -> SourceObject:
    """Return the quantization object of a checkpoint: in config.json, below `text_config`, or in modelopt's own file.

    Raises:
        LoadError: what stands there is no object.
    """
    for above in ((), *((key,) for key in NESTED_KEYS)):
        holder: object = folder.config
        for key in above:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue
        for key in OBJECT_KEYS:
            if holder.get(key) is not None:
                path = (*above, key)
                return SourceObject(_object(holder[key], f"{CONFIG_NAME}: $.{'.'.join(path)}"), path)
    if os.path.lexists(folder.path / MODELOPT_NAME):
        return SourceObject(read_object(folder.path, MODELOPT_NAME), (), MODELOPT_NAME)
    return SourceObject(None, ())


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        message = f"{where}: an object or null is required, found {shown(value)}"
        raise LoadError(message)
    return value


def source_config(folder: CheckpointFolder) -> QuantizationConfig:
    """Return the checkpoint's own config, with the names of its tensors.

    Raises:
        LoadError, ConfigError: its quantization object is refused.
    """
    found = find_source_object(folder)
    facts = ModelFacts(
        model_type=_word(folder.config, "model_type"),
        torch_dtype=model_dtype(folder),
        expert_dtype=_word(folder.config, "expert_dtype"),
        config_file=found.file,
    )
    return QuantizationConfig.from_dict(found.document, facts=facts, names=NameRules(tensors=folder.tensors.keys()))


def model_dtype(folder: CheckpointFolder) -> str:
    """Return the dtype of unquantized weights: as config.json says, else that of most values stored.

    Both spellings of the key (`torch_dtype`, `dtype`) are read; no key is required.
    """
    said = _word(folder.config, "torch_dtype") or _word(folder.config, "dtype")
    if said is not None and said.removeprefix("torch.") in _DTYPE_WORDS.values():
        return said.removeprefix("torch.")
    sizes = dict.fromkeys(_DTYPE_WORDS, 0)
    for tensor in folder.tensors.values():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return _DTYPE_WORDS[most] if sizes[most] else "bfloat16"


def _word(config: Mapping[str, object], key: str) -> str | None:
    """Return a string of config.json, or of its `text_config`; None if there is none."""
    value = config.get(key)
    for nested in NESTED_KEYS:
        below = config.get(nested)
        if value is None and isinstance(below, dict):
            value = below.get(key)
    return value if isinstance(value, str) else None
