"""Strategies for quantization keys, formats and layer configs."""

from __future__ import annotations

from hypothesis import strategies as st

from quant_spec.dtypes import ELEMENT_TYPES, FP32, ElementKind
from quant_spec.formats import QuantFormat, formats
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.quant_key import SHORT_KEYS, QuantKey, ScaleDesc
from quant_spec.unset import UNSET

_STORED = [each for each in ELEMENT_TYPES.values() if each.bits <= 8]  # noqa: PLR2004  (codes are one byte at most)
_SIZES = st.sampled_from([16, 32, 64, 128])


def quant_formats() -> st.SearchStrategy[QuantFormat]:
    """Return a strategy for the registered formats, those of third parties too."""
    return st.deferred(lambda: st.sampled_from(formats()))


def weight_keys() -> st.SearchStrategy[QuantKey]:
    """Return a strategy for keys of weights, short names among them."""
    granularities = st.one_of(
        st.just(PerTensor()), st.just(PerChannel()), st.builds(PerGroup, _SIZES), st.builds(PerBlock, _SIZES, _SIZES)
    )
    scales = st.builds(ScaleDesc, st.sampled_from([None, FP32]), granularities)
    return st.sampled_from(list(SHORT_KEYS.values())) | st.tuples(st.sampled_from(_STORED), scales).map(_key)


def _key(parts: tuple[object, ScaleDesc]) -> QuantKey:
    element, scale = parts
    found = next(each for each in _STORED if each == element)
    return QuantKey(found, scale, symmetric=found.kind is not ElementKind.UNSIGNED)


def activation_keys() -> st.SearchStrategy[QuantKey]:
    """Return a strategy for keys of activations, scaled at run time or by a stored scale."""
    granularities = st.one_of(st.just(PerTensor()), st.just(PerToken()), st.builds(PerGroup, _SIZES))
    scales = st.builds(ScaleDesc, st.sampled_from([None, FP32]), granularities, st.booleans())
    short = st.tuples(st.sampled_from(list(SHORT_KEYS.values())), st.booleans()).map(
        lambda parts: parts[0].as_activation(dynamic=parts[1])
    )
    return short | st.tuples(st.sampled_from(_STORED), scales).map(_key)


def quant_keys() -> st.SearchStrategy[QuantKey]:
    """Return a strategy for keys of weights and activations."""
    return weight_keys() | activation_keys()


def layer_configs() -> st.SearchStrategy[LayerQuantConfig]:
    """Return a strategy for the formats of layers, with absent and null keys."""
    methods = st.sampled_from([None, "", "online", "quark", "fp8"])
    return st.builds(
        LayerQuantConfig,
        weight=st.none() | st.just(UNSET) | weight_keys(),
        activation=st.none() | st.just(UNSET) | activation_keys(),
        quant_method=methods,
    )
