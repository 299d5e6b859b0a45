"""Backends: the choice of one, and refusals that say what would be accepted."""

from __future__ import annotations

import pickle

import attrs
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant_spec import UNSET, LayerQuantConfig, QuantizationConfig, QuantKey, QuantSpecError, format_of_key
from quant_spec.backends import (
    BACKENDS,
    LAYER_KINDS,
    Backend,
    BackendError,
    BackendRegistry,
    default_backends,
    select_backend,
)
from quant_spec.quant_key import MXFP4, MXFP8
from quant_spec.testing import activation_keys, weight_keys

MXFP4_DYNAMIC = MXFP4.as_activation(dynamic=True)
FP8_STATIC = QuantKey.parse("fp8_e4m3/per_tensor:static")


@pytest.mark.parametrize(
    ("activation", "architecture", "name"),
    [
        (UNSET, "gfx950", "aiter_mxfp4_mxfp4"),
        (MXFP4_DYNAMIC, "gfx950", "aiter_mxfp4_mxfp4"),
        (FP8_STATIC, "gfx950", "aiter_mxfp4_fp8"),
        (QuantKey.parse("fp8_e4m3/per_tensor:dynamic"), "gfx1250", "aiter_mxfp4_fp8"),
        (None, "gfx950", "aiter_mxfp4_bf16"),
        (None, "gfx942", "torch_dequantized_mxfp4_moe"),
        (UNSET, "x86_64", "torch_dequantized_mxfp4_moe"),
        (None, "x86_64", "torch_dequantized_mxfp4_moe"),
    ],
)
def test_experts_in_mxfp4(activation: QuantKey | None, architecture: str, name: str) -> None:
    layer = LayerQuantConfig(MXFP4, activation)
    assert select_backend(layer, kind="moe", architecture=architecture).name == name


def test_what_a_document_asks_for_reaches_the_backend() -> None:
    for activation, name in ((None, "aiter_mxfp4_bf16"), ("fp8_per_tensor_static", "aiter_mxfp4_fp8")):
        request = {"targets": {"*experts": {"weight": "mxfp4", "activation": activation}}}
        config = QuantizationConfig.from_online(request)
        layer = config.resolve("model.layers.0.mlp.experts")
        assert select_backend(layer, kind="moe", architecture="gfx950").name == name


def test_the_unquantized_layer_runs_everywhere() -> None:
    for kind in LAYER_KINDS:
        assert select_backend(LayerQuantConfig(), kind=kind, architecture="anything").name == f"torch_{kind}"


@pytest.mark.parametrize(
    ("layer", "architecture", "parts"),
    [
        (
            LayerQuantConfig(MXFP4, MXFP8.as_activation(dynamic=True)),
            "gfx950",
            [
                "moe layer of weight mxfp4 and activation mxfp8:dynamic on gfx950",
                "accepted activations:",
                "mxfp4:dynamic",
            ],
        ),
        (LayerQuantConfig(MXFP4, MXFP4_DYNAMIC), "gfx942", ["mxfp4:dynamic on gfx942", "accepted activations: none"]),
        (
            LayerQuantConfig(QuantKey.parse("nf4/group_64"), UNSET),
            "gfx950",
            ["nf4/group_64 and activation default", "accepted weights there: mxfp4"],
        ),
    ],
)
def test_a_refusal_says_what_would_be_accepted(layer: LayerQuantConfig, architecture: str, parts: list[str]) -> None:
    with pytest.raises(BackendError) as caught:
        select_backend(layer, kind="moe", architecture=architecture)
    for part in parts:
        assert part in str(caught.value)


def test_a_refusal_names_the_architectures_of_the_weight_and_the_nearest_activation() -> None:
    registry = BackendRegistry([Backend("only", "moe", MXFP4, (MXFP4_DYNAMIC,), ("gfx950",))])
    layer = LayerQuantConfig(MXFP4, MXFP4_DYNAMIC)
    with pytest.raises(BackendError, match=r"on gfx942; that weight runs on gfx950$"):
        registry.select(layer, kind="moe", architecture="gfx942")
    static = LayerQuantConfig(MXFP4, MXFP4.as_activation(dynamic=False))
    with pytest.raises(BackendError, match="did you mean 'mxfp4:dynamic'"):
        registry.select(static, kind="moe", architecture="gfx950")
    with pytest.raises(BackendError, match="accepted weights there: none"):
        registry.select(layer, kind="linear", architecture="gfx950")


def test_priority_then_name_decide() -> None:
    some = [
        Backend(name, "linear", None, (None,), priority=priority) for name, priority in (("b", 1), ("a", 1), ("z", 0))
    ]
    registry = BackendRegistry(some)
    assert [backend.name for backend in registry] == ["a", "b", "z"]
    assert registry.select(LayerQuantConfig(), kind="linear", architecture="x").name == "a"
    registry.register(Backend("c", "linear", None, (None,), priority=9))
    assert registry.select(LayerQuantConfig(), kind="linear", architecture="x").name == "c"
    registry.unregister("c")
    assert len(registry) == 3
    with pytest.raises(KeyError):
        registry.unregister("c")


def test_an_unset_activation_takes_the_formats_default_before_a_greater_priority() -> None:
    registry = BackendRegistry(
        [
            Backend("bf16", "moe", MXFP4, (None,), priority=9),
            Backend("default", "moe", MXFP4, (MXFP4_DYNAMIC,), priority=1),
        ]
    )
    unset = LayerQuantConfig(MXFP4, UNSET)
    assert registry.select(unset, kind="moe", architecture="x").name == "default"
    registry.unregister("default")
    assert registry.select(unset, kind="moe", architecture="x").name == "bf16"


def test_an_engine_adds_its_own_and_takes_it_out_again() -> None:
    layer = LayerQuantConfig(MXFP8, MXFP8.as_activation(dynamic=True))
    mine = BACKENDS.register(Backend("mine", "linear", MXFP8, (MXFP8.as_activation(dynamic=True),), ("sm_100",), 5))
    try:
        assert select_backend(layer, kind="linear", architecture="sm_100") is mine
    finally:
        BACKENDS.unregister("mine")
    with pytest.raises(BackendError):
        select_backend(layer, kind="linear", architecture="sm_100")


def test_one_name_is_one_backend() -> None:
    registry = BackendRegistry(default_backends())
    first = next(iter(registry))
    assert registry.register(attrs.evolve(first)) == first
    with pytest.raises(QuantSpecError, match=r"'aiter_mxfp4_mxfp4' is registered already, as aiter_mxfp4_mxfp4 \(moe"):
        registry.register(attrs.evolve(first, priority=0))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": "linaer"}, "unknown layer kind 'linaer'; allowed: linear, moe; did you mean 'linear'"),
        ({"kind": "attention"}, "unknown layer kind 'attention'; allowed: linear, moe$"),
        ({"activations": ()}, "at least one activation"),
        ({"architectures": ()}, "one architecture"),
    ],
)
def test_backends_that_nothing_could_select(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(QuantSpecError, match=fault):
        attrs.evolve(default_backends()[0], **changes)


def test_default_backends_take_what_their_formats_allow() -> None:
    for backend in BACKENDS:
        assert pickle.loads(pickle.dumps(backend)) == backend  # noqa: S301  (made here)
        assert backend.name in str(backend)
        if backend.weight is not None:
            known = format_of_key(backend.weight)
            assert known is not None
            assert {str(key) for key in backend.activations} <= {str(key) for key in known.activations}


@hypothesis.settings(deadline=None, max_examples=100)
@given(
    st.none() | weight_keys(),
    st.none() | st.just(UNSET) | activation_keys(),
    st.sampled_from(LAYER_KINDS),
    st.sampled_from(["gfx942", "gfx950", "sm_90"]),
)
def test_what_is_selected_runs_the_layer(
    weight: QuantKey | None, activation: object, kind: str, architecture: str
) -> None:
    layer = LayerQuantConfig(weight, activation)  # type: ignore[arg-type]
    fitting = [
        each
        for each in BACKENDS
        if each.kind == kind
        and each.runs_on(architecture)
        and str(each.weight) == str(weight)
        and (activation is UNSET or each.takes(activation))  # type: ignore[arg-type]
    ]
    if not fitting:
        with pytest.raises(BackendError):
            select_backend(layer, kind=kind, architecture=architecture)  # type: ignore[arg-type]
        return
    found = select_backend(layer, kind=kind, architecture=architecture)  # type: ignore[arg-type]
    assert found in fitting
    if activation is not UNSET:
        assert found == fitting[0]
