"""Typed quantization configuration: which layer becomes what, and why."""

from quant_spec.errors import ConfigError, Defect, LoadError, PlanError, QuantSpecError, ResolveError
from quant_spec.formats import QuantFormat, format_of_key, formats, get_format, register_format
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.unset import UNSET, Unset

__all__ = [
    "UNSET",
    "ConfigError",
    "Defect",
    "LayerQuantConfig",
    "LoadError",
    "PlanError",
    "QuantFormat",
    "QuantKey",
    "QuantSpecError",
    "ResolveError",
    "ScaleDesc",
    "Unset",
    "format_of_key",
    "formats",
    "get_format",
    "register_format",
]
