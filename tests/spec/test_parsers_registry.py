"""The parser registry, third-party parsers, and hostile documents given as objects."""

from __future__ import annotations

import importlib.metadata
import time
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Annotated, ClassVar

import attrs
import pytest

from quant_spec import ConfigError, QuantizationConfig, QuantSpecError, register_quant_parser
from quant_spec.converter import structure
from quant_spec.dtypes import FP8_E4M3, INT4
from quant_spec.granularity import PerTensor
from quant_spec.layer_config import LayerQuantConfig
from quant_spec.parsers import base
from quant_spec.parsers.base import PARSERS, ModelFacts, ParsedQuantConfig, ParserRegistry, get_parser
from quant_spec.parsers.reading import int_element
from quant_spec.quant_key import QuantKey, ScaleDesc
from quant_spec.rules import as_integer, integer

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = QuantKey(FP8_E4M3, ScaleDesc(None, PerTensor()))


class ThirdParty:
    """What another distribution would write."""

    convertible: ClassVar[bool] = True

    def parse(self, document: Mapping[str, object], facts: ModelFacts) -> ParsedQuantConfig:
        return ParsedQuantConfig("third_party", LayerQuantConfig(KEY, None, f"{document['note']} {facts.torch_dtype}"))


class Other(ThirdParty):
    """Another parser of the same method."""


def test_a_third_party_parser_by_decorator() -> None:
    register_quant_parser("third_party")(ThirdParty)
    try:
        config = QuantizationConfig.from_dict({"quant_method": "third_party", "note": "hello"})
        assert config.resolve("a").quant_method == "hello bfloat16"
        online = QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, source=config)
        assert str(online.resolve("a").weight) == "mxfp4"
        assert "third_party" in PARSERS.methods()
        register_quant_parser("third_party")(ThirdParty)
        with pytest.raises(QuantSpecError, match="already has the parser ThirdParty"):
            register_quant_parser("third_party")(Other)
    finally:
        PARSERS.unregister("third_party")
    with pytest.raises(ConfigError, match="third_party"):
        get_parser("third_party")


def test_a_built_in_method_is_not_replaced() -> None:
    with pytest.raises(QuantSpecError, match="'fp8' already has the parser"):
        register_quant_parser("fp8")(ThirdParty)


def test_a_third_party_parser_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("from_plugin", f"{__name__}:ThirdParty", base.ENTRY_POINT_GROUP)
    decorated = EntryPoint("decorated", "anything:else", base.ENTRY_POINT_GROUP)
    loaded: list[str] = []

    def load(self: EntryPoint) -> type:
        loaded.append(self.name)
        return ThirdParty

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point, decorated] if group == point.group else []
    )
    registry = ParserRegistry()
    monkeypatch.setattr(base, "PARSERS", registry)
    registry.register(("decorated",), ThirdParty())
    assert registry.find("from_plugin") is not None
    assert registry.find("still_unknown") is None
    assert loaded == ["from_plugin", "decorated"]


def test_more_defects_than_anyone_reads() -> None:
    for request in ({"exclude_layer": [1] * 5_000}, {"layer_quant_config": {f"a{index}": 1 for index in range(5_000)}}):
        with pytest.raises(ConfigError, match="maybe more defects: nothing after member 999") as raised:
            QuantizationConfig.from_online(request)
        assert len(raised.value.defects) == 1_001


def test_lone_surrogates() -> None:
    for request in ({"exclude_layer": ["\ud800"]}, {"layer_quant_config": {"a\udfff": "mxfp4"}}):
        with pytest.raises(ConfigError, match="surrogate"):
            QuantizationConfig.from_online(request)
    assert QuantizationConfig.from_online({"global_quant_config": "mxfp4", "exclude_layer": ["é"]}).exclude_layers


@pytest.mark.parametrize(
    "request_",
    [
        {"global_quant_config": "mxfp4", "exclude_layer": [f"model.layers.{index}" for index in range(100_000)]},
        {"layer_quant_config": {f"model.layers.{index}": "mxfp4" for index in range(50_000)}},
        {"global_quant_config": "mxfp4", "exclude_layer": ["a" * 100_000, "*" * 1_000 + "b"]},
        {"exclude_layer": [1.5] * 100_000},
        {"exclude_layer": ["re:(a+)+$", "re:(a|a)*b", "re:" + "(" * 5_000]},
        {"layer_quant_config": {"a": {"b": {"c": [float("nan")]}}}},
    ],
    ids=["entries", "keys", "long", "wrong", "regexes", "nan"],
)
def test_hostile_requests_are_answered_in_bounded_time(request_: object) -> None:
    start = time.perf_counter()
    try:
        QuantizationConfig.from_online(request_).resolve("model.layers.7.mlp")
    except QuantSpecError as error:
        assert str(error)  # noqa: PT017  (either outcome is right; only time counts)
    assert time.perf_counter() - start < 10


def test_a_hook_that_fails_otherwise_is_not_hidden() -> None:
    @attrs.frozen(kw_only=True)
    class Broken:
        value: Annotated[int, integer()] = 0

        def __attrs_post_init__(self) -> None:
            message = "a fault in the class"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="a fault in the class"):
        structure({"value": 1}, Broken)
    with pytest.raises(ConfigError, match="integer"):
        structure({"value": 1.5}, Broken)


@attrs.frozen(kw_only=True)
class Plain:
    """A document with a list."""

    KIND: ClassVar[str] = "of_another_distribution"

    sizes: tuple[Annotated[int, integer()], ...] = ()


def test_plain_lists() -> None:
    assert structure({"sizes": [1, 2]}, Plain).sizes == (1, 2)
    assert integer().schema() == {"type": "integer"}
    with pytest.raises(ConfigError, match=r"\$\.sizes: expected list"):
        structure({"sizes": 1}, Plain)


def test_numbers() -> None:
    assert as_integer(128.0) == 128
    assert int_element(4, symmetric=True) == INT4
    with pytest.raises(ConfigError, match=r"uint7.*int2"):
        int_element(7, symmetric=False)
