"""Formats: one file each. `register_format` adds one; everything else reads the registry."""

from quant_spec.formats.base import (
    QuantFormat,
    engine_quant_type,
    format_of_key,
    formats,
    get_format,
    key_nbytes,
    register_format,
    request_words,
)

__all__ = [
    "QuantFormat",
    "engine_quant_type",
    "format_of_key",
    "formats",
    "get_format",
    "key_nbytes",
    "register_format",
    "request_words",
]
