"""Strategies for property tests of configs, names and weights, and a plain statement of the rules to test against.

Needs `hypothesis`, which the library itself does not require. Third parties use it to test a parser, a format or an
integration over the same inputs as this library's own laws.
"""

from quant_spec.testing.documents import checkpoint_configs, online_requests, requests, targets_requests
from quant_spec.testing.expressions import backtracking_regexes, globs, linear_regexes, special_regexes
from quant_spec.testing.families import MODEL_FAMILIES, ModelFamily
from quant_spec.testing.keys import activation_keys, layer_configs, quant_formats, quant_keys, weight_keys
from quant_spec.testing.names import (
    entries,
    free_names,
    literals,
    model_families,
    module_names,
    name_mappings,
    name_rules,
)
from quant_spec.testing.plain_rules import plain_outcome, plain_resolve
from quant_spec.testing.tensors import weights

__all__ = [
    "MODEL_FAMILIES",
    "ModelFamily",
    "activation_keys",
    "backtracking_regexes",
    "checkpoint_configs",
    "entries",
    "free_names",
    "globs",
    "layer_configs",
    "linear_regexes",
    "literals",
    "model_families",
    "module_names",
    "name_mappings",
    "name_rules",
    "online_requests",
    "plain_outcome",
    "plain_resolve",
    "quant_formats",
    "quant_keys",
    "requests",
    "special_regexes",
    "targets_requests",
    "weight_keys",
    "weights",
]
