"""An operator's request: which of the two shapes it has, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from quant_spec.errors import ConfigError, Defect, join_path, wrong_type
from quant_spec.parsers.online import OnlineDocument, parse_online
from quant_spec.parsers.targets import TargetsDocument, parse_targets

if TYPE_CHECKING:
    from quant_spec.parsers.base import ParsedQuantConfig


def _keys(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in attrs.fields(cls))


def parse_request(request: object, *, shorthand: str | None = None) -> ParsedQuantConfig | None:
    """Return an operator's request in either shape; None if it asks for no format.

    Args:
        request: ATOM's object (`global_quant_config`, `layer_quant_config`, `exclude_layer`), vLLM's (`linear`, `moe`,
            `targets`, `ignore`), or null for none.
        shorthand: vLLM's `--quantization` word beside it; `online` says only that the object is to be read.

    Raises:
        ConfigError: no object, keys of both shapes, a shorthand beside ATOM's object, or any defect inside.
    """
    if request is None:
        request = {}
    if not isinstance(request, Mapping):
        raise ConfigError(wrong_type("$", request, "object", "null"))
    atom = [key for key in request if key in _keys(OnlineDocument)]
    vllm = [key for key in request if key in _keys(TargetsDocument)]
    if atom and (vllm or shorthand):
        found = [join_path("$", key) for key in vllm] or ["the shorthand"]
        problem = f"{', '.join(found)} cannot stand beside {', '.join(atom)}: they belong to two shapes of request"
        path = join_path("$", vllm[0]) if vllm else "$"
        raise ConfigError(Defect(path, problem, vllm or shorthand, (_shape(OnlineDocument), _shape(TargetsDocument))))
    parsed = parse_targets(request, shorthand) if vllm or shorthand else parse_online(request)
    return parsed if parsed.quant_method else None


def _shape(cls: type) -> str:
    return " / ".join(field.name for field in attrs.fields(cls))
