"""Typed quantization configuration: which layer becomes what, and why."""

from quant_spec.config import QuantizationConfig
from quant_spec.decision import Decision, ModuleInfo
from quant_spec.errors import ArgumentError, ConfigError, Defect, LoadError, PlanError, QuantSpecError, ResolveError
from quant_spec.formats import QuantFormat, format_of_key, formats, get_format, register_format
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.mapping import NameRules
from quant_spec.matching import Why
from quant_spec.parsers import ModelFacts, ParsedQuantConfig, QuantParser, get_parser, register_quant_parser
from quant_spec.patterns import Pattern, PatternKind, Scope
from quant_spec.plan import ModelPlan, ModulePlan, plan
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.sharding import RowRange, shard_rows
from quant_spec.stored import scale_tensors, weight_scale_of
from quant_spec.unset import UNSET, Unset
from quant_spec.version import __version__

__all__ = [
    "UNSET",
    "ArgumentError",
    "ConfigError",
    "Decision",
    "Defect",
    "LayerQuantConfig",
    "LoadError",
    "ModelFacts",
    "ModelPlan",
    "ModuleInfo",
    "ModulePlan",
    "NameRules",
    "ParsedQuantConfig",
    "Pattern",
    "PatternKind",
    "PlanError",
    "QuantFormat",
    "QuantKey",
    "QuantParser",
    "QuantSpecError",
    "QuantizationConfig",
    "ResolveError",
    "RowRange",
    "ScaleDesc",
    "Scope",
    "Unset",
    "Why",
    "__version__",
    "format_of_key",
    "formats",
    "get_format",
    "get_parser",
    "plan",
    "register_format",
    "register_quant_parser",
    "scale_tensors",
    "shard_rows",
    "weight_scale_of",
]
