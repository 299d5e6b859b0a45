"""Parsers: one file a document family, found by `quant_method`."""

from quant_spec.parsers.base import (
    ModelFacts,
    ParsedQuantConfig,
    QuantParser,
    get_parser,
    register_quant_parser,
)

__all__ = ["ModelFacts", "ParsedQuantConfig", "QuantParser", "get_parser", "register_quant_parser"]
