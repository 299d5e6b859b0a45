"""Which parser reads a checkpoint's quantization object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quant_spec.errors import ConfigError, Defect, shown, wrong_type
from quant_spec.parsers.base import REQUEST_SHAPES, ModelFacts, ParsedQuantConfig, get_parser

LOAD_FLAGS: Final = ("load_in_4bit", "load_in_8bit")
_METHOD_KEY: Final = "quant_method"


def detect_method(document: Mapping[str, object] | None, facts: ModelFacts) -> str | None:
    """Return the `quant_method` of a checkpoint's quantization object; None: there is none, nothing is quantized.

    The word under `quant_method` decides. Without it, a load flag means bitsandbytes, and modelopt's nested object
    (`quantization` with `quant_algo`, the layout of `hf_quant_config.json`) means modelopt.

    Raises:
        ConfigError: no known method is named.
    """
    if document is None or not document:
        return None
    if not isinstance(document, Mapping):
        raise ConfigError(wrong_type("$", document, "object", "null"))
    method = document.get(_METHOD_KEY)
    if method is not None:
        return _known(method)
    if any(key in document for key in LOAD_FLAGS):
        return "bitsandbytes"
    if "quantization" in document or facts.config_file == "hf_quant_config.json":
        return "modelopt"
    expected = ("quant_method", "load_in_4bit", "load_in_8bit", "quantization.quant_algo")
    raise ConfigError(
        Defect("$.quant_method", "missing key 'quant_method': nothing says how to read this", None, expected)
    )


def _known(method: object) -> str:
    if not isinstance(method, str):
        raise ConfigError(wrong_type("$.quant_method", method, "string"))
    if method in REQUEST_SHAPES:
        problem = f"{shown(method)} is the shape of a request, no checkpoint's quant_method"
        raise ConfigError(Defect("$.quant_method", problem, method))
    get_parser(method)
    return method


def parse_checkpoint(document: Mapping[str, object] | None, facts: ModelFacts) -> ParsedQuantConfig:
    """Return the parsed quantization object of a checkpoint; null and {} mean that it is unquantized.

    Raises:
        ConfigError: an unknown method, or any defect inside.
    """
    method = detect_method(document, facts)
    if method is None or document is None:
        return ParsedQuantConfig(None)
    return get_parser(method).parse(document, facts)
