"""Strategies for documents: operators' requests in both shapes, and quantization objects of checkpoints."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from hypothesis import strategies as st

from quant_spec.formats import formats, request_words
from quant_spec.testing.families import MODEL_FAMILIES
from quant_spec.testing.names import entries
from quant_spec.vllm_names import ACTIVATION_NAMES, weight_words

if TYPE_CHECKING:
    from collections.abc import Iterable

Document: TypeAlias = "dict[str, object]"


def _names(names: Iterable[str] | None) -> tuple[str, ...]:
    if names is not None:
        return tuple(names)
    return tuple(dict.fromkeys(name for family in MODEL_FAMILIES.values() for name in family.checkpoint_names(2, 2)))


def _some(fixed: dict[str, st.SearchStrategy[object]], optional: dict[str, st.SearchStrategy[object]]) -> _Documents:
    return st.fixed_dictionaries(fixed, optional=optional)


_Documents: TypeAlias = "st.SearchStrategy[Document]"


def online_requests(names: Iterable[str] | None = None) -> _Documents:
    """Return a strategy for requests with `global_quant_config`, `layer_quant_config` and `exclude_layer`.

    Args:
        names: modules that the entries have to do with; None: those of all families.
    """
    return _online_requests(_names(names))


@functools.lru_cache(maxsize=256)
def _online_requests(names: tuple[str, ...]) -> _Documents:
    words = st.deferred(lambda: st.sampled_from(request_words()))
    entry = entries(names)
    return _some(
        {},
        {
            "global_quant_config": words | st.sampled_from([None, "", " MXFP4 "]),
            "layer_quant_config": st.dictionaries(entry, words, max_size=4),
            "exclude_layer": st.none() | entry | st.lists(entry | st.just(""), max_size=4),
        },
    )


def targets_requests(names: Iterable[str] | None = None) -> _Documents:
    """Return a strategy for requests with `linear` and `moe`, or `targets`, and `ignore`."""
    return _targets_requests(_names(names))


@functools.lru_cache(maxsize=256)
def _targets_requests(names: tuple[str, ...]) -> _Documents:
    entry = entries(names)
    weights = st.deferred(lambda: st.sampled_from(weight_words()))
    activations = st.sampled_from(list(ACTIVATION_NAMES))
    spec = st.one_of(
        _some({"weight": weights}, {"activation": st.none() | activations}),
        _some({"activation": st.none() | activations}, {}),
        st.just({"weight": None}),
    )

    def slot(kind: str) -> st.SearchStrategy[object]:
        words = st.deferred(
            lambda: st.sampled_from([each.name for each in formats() if each.requestable and kind in each.slots])
        )
        return st.none() | words | spec

    by_kind = _some({}, {"linear": slot("linear"), "moe": slot("moe"), "ignore": st.lists(entry, max_size=3)})
    by_pattern = _some(
        {"targets": st.dictionaries(entry, weights | spec, min_size=1, max_size=3)},
        {"ignore": st.none() | st.lists(entry, max_size=3)},
    )
    return by_kind | by_pattern


def requests(names: Iterable[str] | None = None) -> _Documents:
    """Return a strategy for requests of either shape."""
    return online_requests(names) | targets_requests(names)


def checkpoint_configs(names: Iterable[str] | None = None) -> st.SearchStrategy[Document | None]:
    """Return a strategy for the `quantization_config` of checkpoints that a request can convert; None: unquantized."""
    return _checkpoint_configs(_names(names))


@functools.lru_cache(maxsize=256)
def _checkpoint_configs(names: tuple[str, ...]) -> st.SearchStrategy[Document | None]:
    entry = entries(names)
    return st.one_of(st.none(), _fp8(entry), _quark(entry), _compressed_tensors(entry))


def _fp8(entry: st.SearchStrategy[str]) -> _Documents:
    return _some(
        {"quant_method": st.just("fp8")},
        {
            "weight_block_size": st.just([128, 128]),
            "activation_scheme": st.just("dynamic"),
            "modules_to_not_convert": st.none() | st.lists(entry, max_size=4),
            "ignored_layers": st.lists(entry, max_size=3),
        },
    )


def _quark(entry: st.SearchStrategy[str]) -> _Documents:
    ptpc = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "group_size": None}
    token = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True, "group_size": None}
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"}
    layers = st.sampled_from(
        [
            {"weight": ptpc, "input_tensors": token, "bias": None, "output_tensors": None},
            {"weight": mxfp4, "input_tensors": {**mxfp4, "is_dynamic": True}, "bias": None, "output_tensors": None},
            {"weight": mxfp4, "input_tensors": None, "bias": None, "output_tensors": None},
        ]
    )
    return _some(
        {"quant_method": st.just("quark"), "global_quant_config": layers},
        {
            "layer_quant_config": st.dictionaries(entry, layers, max_size=3),
            "exclude": st.lists(entry, max_size=4),
        },
    )


def _compressed_tensors(entry: st.SearchStrategy[str]) -> _Documents:
    channel = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    block = {**channel, "strategy": "block", "block_structure": [128, 128]}
    token = {**channel, "strategy": "token", "dynamic": True}
    schemes: list[Document] = [{"weights": channel, "input_activations": token}, {"weights": block}]
    targets = st.lists(entry | st.just("Linear"), min_size=1, max_size=3, unique=True)
    groups = st.lists(st.tuples(targets, st.sampled_from(schemes)), min_size=1, max_size=2).map(_groups)
    return _some(
        {"quant_method": st.just("compressed-tensors"), "config_groups": groups},
        {"ignore": st.lists(entry, max_size=4), "format": st.just("float-quantized")},
    )


def _groups(parts: list[tuple[list[str], dict[str, object]]]) -> Document:
    return {f"group_{index}": {"targets": targets, **scheme} for index, (targets, scheme) in enumerate(parts)}
