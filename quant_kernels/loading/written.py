"""What the config of a written checkpoint must say: the modules that are stored, and a check that it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from quant_spec import NameRules, PlanError, QuantizationConfig
from quant_spec.layer_config import LayerQuantConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@attrs.frozen
class StoredModule:
    """A module of the written checkpoint.

    Attributes:
        name: name of the module that holds the weight; an expert's own for weights stored one by one.
        config: its format; unquantized modules have no weight key.
        container: the container of routed experts above it, or an empty string.
    """

    name: str
    config: LayerQuantConfig
    container: str = ""


def check_document(document: Mapping[str, object], modules: Sequence[StoredModule]) -> None:
    """Read a document back and compare what it says with what is stored, of modules and containers of experts.

    Raises:
        PlanError: it says something else of one.
    """
    stored = {module.name: module.config for module in modules}
    stored |= {module.container: module.config for module in modules if module.container}
    names = NameRules(tensors=[f"{module.name}.weight" for module in modules])
    resolved = QuantizationConfig.from_dict(document, names=names).resolve_many(stored)
    for name, config in stored.items():
        for part in ("weight_key", "activation_key"):
            found, meant = getattr(resolved[name], part), getattr(config, part)
            if str(found) != str(meant):
                message = f"{name}: stored as {meant}, but the config to be written would be read as {found}"
                raise PlanError(message)
