"""The rules of resolution said plainly, one entry and one name at a time: what the fast resolver is tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant_spec.decision import meet
from quant_spec.errors import ResolveError
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.mapping import is_container
from quant_spec.matching import Outcome, Why
from quant_spec.patterns import EXPERTS, Pattern, PatternKind

if TYPE_CHECKING:
    from quant_spec.config import QuantizationConfig


def _entries(config: QuantizationConfig) -> list[tuple[Why, Pattern, LayerQuantConfig]]:
    excluded = LayerQuantConfig(None, None, config.global_spec.quant_method)
    return [
        *((Why.EXCLUDE, entry, excluded) for entry in config.exclude_layers),
        *((Why.PATTERN, entry, spec) for entry, spec in config.layer_pattern_specs),
        *((Why.GLOBAL, entry, spec) for entry, spec in config.class_specs),
    ]


def _covers(config: QuantizationConfig, entry: Pattern, name: str) -> bool:
    """Tell whether `entry` covers `name`; a checkpoint's entries are in checkpoint spelling, a request's are not."""
    if config.source is not None or not config.names.name_mapping:
        return entry.covers(name, "Linear")
    if entry.kind is PatternKind.LITERAL:
        return entry.renamed(config.names.to_module(entry.target)).covers(name)
    spellings = (name, *config.names.to_checkpoint(name))
    return any(entry.covers(each, "Linear") for each in spellings)


def _fitting(config: QuantizationConfig, name: str) -> set[int]:
    return {index for index, (_, entry, _) in enumerate(_entries(config)) if _covers(config, entry, name)}


def _members(config: QuantizationConfig, name: str) -> tuple[str, ...]:
    names = config.names
    if not is_container(name):
        return names.shards(name)
    if names.num_experts:
        return tuple(f"{name}.{expert}.{leaf}" for expert in range(names.num_experts) for leaf in names.expert_leaves)
    literals = (entry.target for _, entry, _ in _entries(config) if entry.kind is PatternKind.LITERAL)
    below = [names.to_module(target) for target in literals]
    return tuple(dict.fromkeys(each for each in below if _container_of(each) == name))


def _container_of(name: str) -> str | None:
    """Return the innermost expert container above `name`, or None."""
    segments = name.split(".")
    inner = [index for index, segment in enumerate(segments[:-1]) if segment == EXPERTS]
    return ".".join(segments[: inner[-1] + 1]) if inner else None


def plain_outcome(config: QuantizationConfig, name: str) -> Outcome:
    """Return what the entries of `config` itself (not of the checkpoint below it) say of the module `name`.

    Tensors are not looked at: for configs whose name rules list none.

    Raises:
        ResolveError: shards or experts disagree.
    """
    entries = _entries(config)
    members = _members(config, name)

    def first(hits: set[int]) -> Outcome:
        if not hits:
            return Outcome(Why.GLOBAL, None, config.global_spec)
        return Outcome(*(entries[min(hits)]))

    if not members:
        return first(_fitting(config, name))
    each = [_fitting(config, member) for member in members]
    if not is_container(name):
        patterns = {PatternKind.GLOB, PatternKind.REGEX}
        direct = {
            index
            for index in _fitting(config, name)
            if entries[index][1].kind not in patterns or not any(index in hits for hits in each)
        }
        each = [hits | direct for hits in each]
    found = [first(hits) for hits in each]
    if len({(outcome.spec.weight, outcome.spec.activation) for outcome in found}) > 1:
        message = f"{name}: its members disagree"
        raise ResolveError(message)
    order = [Why.EXCLUDE, Why.PATTERN, Why.GLOBAL]
    return min(found, key=lambda outcome: order.index(outcome.why))


def plain_resolve(config: QuantizationConfig, name: str) -> LayerQuantConfig:
    """Return what `config.resolve(name)` must return.

    Raises:
        ResolveError: shards or experts disagree, or an activation is asked for alone where the checkpoint has another.
    """
    outcome = plain_outcome(config, name)
    if config.source is None:
        return outcome.spec.resolved()
    return meet(name, outcome, plain_resolve(config.source, name), None).config
