"""vLLM's names of quantization keys (`fp8_per_token`, `fp8_per_block_static`, …), to and from `QuantKey`.

A name means one tensor's format: as a weight it has stored scales (`_static`, or no ending), as an activation it ends
in `_static`, `_dynamic` or names its tokens. Words of the case vocabulary (`str(QuantKey)`) are understood as well.
"""

from __future__ import annotations

from typing import Final

import attrs

from quant_spec.arguments import check_instance
from quant_spec.dtypes import FP8_E4M3, FP32, INT8
from quant_spec.errors import ConfigError, unknown
from quant_spec.formats import formats
from quant_spec.formats.base import FORMATS
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.quant_key import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8, NVFP4, QuantKey, ScaleDesc

_TENSOR: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerTensor()))
_CHANNEL: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerChannel()))
_TOKEN: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerToken()))
_BLOCK: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerBlock(128, 128)))
_GROUP: Final = QuantKey(FP8_E4M3, ScaleDesc(FP32, PerGroup(128)))
_INT8_CHANNEL: Final = QuantKey(INT8, ScaleDesc(FP32, PerChannel()))
_INT8_TOKEN: Final = QuantKey(INT8, ScaleDesc(FP32, PerToken()))
_INT8_TENSOR: Final = QuantKey(INT8, ScaleDesc(FP32, PerTensor()))

WEIGHT_NAMES: Final[dict[str, QuantKey]] = {
    "fp8_per_tensor_static": _TENSOR,
    "fp8_per_channel_static": _CHANNEL,
    "fp8_per_block_static": _BLOCK,
    "int8_per_channel_static": _INT8_CHANNEL,
    "mxfp4": MXFP4,
    "mxfp6_e2m3": MXFP6_E2M3,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}
"""Names of weight keys."""

ACTIVATION_NAMES: Final[dict[str, QuantKey]] = {
    "fp8_per_tensor_static": _TENSOR.as_activation(dynamic=False),
    "fp8_per_tensor_dynamic": _TENSOR.as_activation(dynamic=True),
    "fp8_per_token": _TOKEN.as_activation(dynamic=True),
    "fp8_per_token_dynamic": _TOKEN.as_activation(dynamic=True),
    "fp8_per_block_dynamic": _GROUP.as_activation(dynamic=True),
    "fp8_per_block_static": _GROUP.as_activation(dynamic=False),
    "int8_per_token": _INT8_TOKEN.as_activation(dynamic=True),
    "int8_per_token_dynamic": _INT8_TOKEN.as_activation(dynamic=True),
    "int8_per_tensor_static": _INT8_TENSOR.as_activation(dynamic=False),
    "mxfp4": MXFP4.as_activation(dynamic=True),
    "mxfp6_e2m3": MXFP6_E2M3.as_activation(dynamic=True),
    "mxfp6_e3m2": MXFP6_E3M2.as_activation(dynamic=True),
    "mxfp8": MXFP8.as_activation(dynamic=True),
    "nvfp4": NVFP4.as_activation(dynamic=True),
}
"""Names of activation keys."""


def weight_words() -> tuple[str, ...]:
    """Return every name of a weight: vLLM's, and the names, aliases and shorthands of the registered formats."""
    known = dict.fromkeys(WEIGHT_NAMES)
    for each in formats():
        known.update(dict.fromkeys((each.name, *each.aliases, *each.shorthands)))
    return tuple(known)


def _with_scales(key: QuantKey) -> QuantKey:
    """Fill in fp32 where a word of the vocabulary leaves the scale's dtype open: a request decides what is written."""
    return key if key.scale.dtype else attrs.evolve(key, scale=attrs.evolve(key.scale, dtype=FP32))


def weight_key(word: str, path: str = "$") -> QuantKey:
    """Return the weight key that `word` means: a vLLM name, a format's word, or a key as `str(QuantKey)` prints it.

    >>> str(weight_key("fp8_per_block_static"))
    'fp8_e4m3/block_128x128'

    Raises:
        ConfigError: it means none, or an activation.
        ArgumentError: it is no string.
    """
    check_instance("word", word, str)
    text = word.strip().lower()
    if text.isascii() and text in WEIGHT_NAMES:
        return WEIGHT_NAMES[text]
    found = FORMATS.find(text) if text.isascii() else None
    if found is not None:
        return found.weight
    if "/" in text:
        key = _with_scales(QuantKey.parse(word.strip(), path))
        if key.scale.dynamic is None and not isinstance(key.scale.granularity, PerToken):
            return key
    raise ConfigError(unknown(path, "weight format", word, weight_words()))


def activation_key(word: str, path: str = "$") -> QuantKey:
    """Return the activation key that `word` means: a vLLM name, or a key as `str(QuantKey)` prints it.

    >>> str(activation_key("fp8_per_block_dynamic"))
    'fp8_e4m3/group_128:dynamic'

    Raises:
        ConfigError: it means none, or a weight.
        ArgumentError: it is no string.
    """
    check_instance("word", word, str)
    text = word.strip().lower()
    if text.isascii() and text in ACTIVATION_NAMES:
        return ACTIVATION_NAMES[text]
    if ":" in text:
        key = _with_scales(QuantKey.parse(word.strip(), path))
        if key.scale.dynamic is not None and not isinstance(key.scale.granularity, (PerChannel, PerBlock)):
            return key
    raise ConfigError(unknown(path, "activation format", word, ACTIVATION_NAMES))


def vllm_name(key: QuantKey) -> str | None:
    """Return vLLM's name of a key, or None if it has none.

    >>> vllm_name(QuantKey.parse("fp8_e4m3/per_token:dynamic"))
    'fp8_per_token'

    Raises:
        ArgumentError: it is no key.
    """
    check_instance("key", key, QuantKey)
    table = WEIGHT_NAMES if key.scale.dynamic is None else ACTIVATION_NAMES
    return next((name for name, each in table.items() if each.same_format(key)), None)
