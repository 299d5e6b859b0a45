"""vLLM's request: every cell of {absent, null, name} x {weight, activation} x {shorthand or not}, slots and words."""

from __future__ import annotations

import itertools

import pytest

from quant_spec import UNSET, ConfigError, QuantizationConfig, QuantKey, get_format
from quant_spec.parsers.base import ModelFacts, ParsedQuantConfig, get_parser
from quant_spec.parsers.requests import parse_request
from quant_spec.vllm_names import ACTIVATION_NAMES, WEIGHT_NAMES, activation_key, vllm_name, weight_key, weight_words

MXFP4, PTPC = get_format("mxfp4").weight, get_format("ptpc_fp8").weight
MXFP8_IN = QuantKey.parse("mxfp8:dynamic")
ABSENT = "absent"


def parsed(request: object, shorthand: str | None = None) -> ParsedQuantConfig:
    found = parse_request(request, shorthand=shorthand)
    assert found is not None
    return found


def spec_of(weight: str | None, activation: str | None) -> dict[str, str | None]:
    given = {"weight": weight, "activation": activation}
    return {key: value for key, value in given.items() if value != ABSENT}


CELLS = {
    # (weight, activation, shorthand): (weight, activation) of the parsed target, or None where it is refused
    (ABSENT, ABSENT, None): None,
    (ABSENT, None, None): (UNSET, None),
    (ABSENT, "mxfp8", None): (UNSET, MXFP8_IN),
    (None, ABSENT, None): (None, None),
    (None, None, None): (None, None),
    (None, "mxfp8", None): None,
    ("mxfp4", ABSENT, None): (MXFP4, UNSET),
    ("mxfp4", None, None): (MXFP4, None),
    ("mxfp4", "mxfp8", None): (MXFP4, MXFP8_IN),
    (ABSENT, ABSENT, "fp8_per_channel"): None,
    (ABSENT, None, "fp8_per_channel"): (PTPC, None),
    (ABSENT, "mxfp8", "fp8_per_channel"): (PTPC, MXFP8_IN),
    (None, ABSENT, "fp8_per_channel"): (None, None),
    (None, None, "fp8_per_channel"): (None, None),
    (None, "mxfp8", "fp8_per_channel"): None,
    ("mxfp4", ABSENT, "fp8_per_channel"): (MXFP4, UNSET),
    ("mxfp4", None, "fp8_per_channel"): (MXFP4, None),
    ("mxfp4", "mxfp8", "fp8_per_channel"): (MXFP4, MXFP8_IN),
}


def test_the_table_is_full() -> None:
    words = (ABSENT, None, "mxfp4"), (ABSENT, None, "mxfp8"), (None, "fp8_per_channel")
    assert set(CELLS) == set(itertools.product(*words))


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("where", ["targets", "linear", "moe"])
def test_truth_table(cell: tuple[str | None, str | None, str | None], where: str) -> None:
    weight, activation, shorthand = cell
    given = spec_of(weight, activation)
    request = {"targets": {"*": given}} if where == "targets" else {where: given}
    expected = CELLS[cell]
    if expected is None:
        with pytest.raises(ConfigError, match=r"targets|linear|moe"):
            parse_request(request, shorthand=shorthand)
        return
    found = parse_request(request, shorthand=shorthand)
    if found is None:
        assert not any(isinstance(each, QuantKey) for each in expected)
        assert shorthand is None
        return
    spec = found.global_spec if where == "linear" else found.layer_pattern_specs[0][1]
    assert (spec.weight, spec.activation) == expected


@pytest.mark.parametrize("given", ["mxfp4", {"weight": "mxfp4"}])
def test_a_bare_word_equals_an_object_with_only_a_weight(given: object) -> None:
    assert parsed({"linear": given}).global_spec == parsed({"linear": {"weight": "mxfp4"}}).global_spec
    (_, spec) = parsed({"targets": {"a": given}}).layer_pattern_specs[0]
    assert (spec.weight, spec.activation) == (MXFP4, UNSET)


def test_a_slot_speaks_of_its_kind_alone() -> None:
    found = parsed({"linear": "mxfp4"})
    ((slot, spec),) = found.class_specs
    assert slot.covers("model.layers.0.mlp.experts")
    assert not slot.covers("model.layers.0.mlp.shared_experts.up_proj")
    assert spec.weight is None
    found = parsed({"moe": "mxfp4"})
    assert found.global_spec.weight is None
    ((slot, spec),) = found.layer_pattern_specs
    assert (slot.path, spec.weight) == ("$.moe", MXFP4)


def test_null_slots_turn_a_kind_off_and_beat_the_shorthand() -> None:
    found = parsed({"moe": None}, shorthand="mxfp4")
    assert found.global_spec.weight == MXFP4
    assert found.layer_pattern_specs[0][1].weight is None
    found = parsed({"linear": None}, shorthand="mxfp4")
    assert found.global_spec.weight is None
    assert found.class_specs[0][1].weight == MXFP4
    assert parse_request({"linear": None, "moe": {"weight": None}}) is None


def test_shorthands_alone() -> None:
    both = parsed(None, shorthand=" FP8_per_block ")
    assert str(both.global_spec.weight) == "fp8_e4m3/block_128x128"
    assert both.layer_pattern_specs == both.class_specs == ()
    experts = parsed({}, shorthand="int8_per_channel_weight_only")
    assert experts.global_spec.weight is None
    assert str(experts.layer_pattern_specs[0][1].weight) == "int8/per_channel"
    assert parsed({"linear": "mxfp4"}, shorthand="online").global_spec.weight == MXFP4
    assert parse_request(None, shorthand="online") is None


def test_what_asks_for_nothing_is_no_request() -> None:
    for request in ({}, None, {"ignore": ["lm_head"]}, {"targets": {}}, {"targets": {"a": {"weight": None}}}):
        assert parse_request(request) is None


@pytest.mark.parametrize(
    ("request_", "shorthand", "names"),
    [
        ({"linear": "mxfp4"}, "mxfp5", ["shorthand", "mxfp5", "mxfp4"]),
        ({"global_quant_config": "mxfp4"}, "mxfp4", ["shorthand", "global_quant_config"]),
        ({"global_quant_config": "mxfp4", "targets": {}}, None, ["targets", "global_quant_config"]),
        ({"targets": {}, "linear": None}, None, ["targets", "linear"]),
        ({"targets": {"a": None}}, None, ["$.targets.a", "null"]),
        ({"targets": {"": "mxfp4"}}, None, ["empty pattern"]),
        ({"linear": 3}, None, ["$.linear", "number"]),
        ({"linear": {"weight": "fp8_per_tensor_dynamic"}}, None, ["fp8_per_tensor_dynamic", "fp8_per_tensor_static"]),
        ({"linear": {"weight": "mxfp4:dynamic"}}, None, ["$.linear.weight"]),
        ({"linear": {"weight": "fp8_e4m3/per_token"}}, None, ["$.linear.weight"]),
        ({"linear": {"activation": "fp8_e4m3/per_channel:dynamic"}}, None, ["$.linear.activation"]),
        ({"linear": {"activation": "mxfp9"}}, None, ["mxfp9", "mxfp8"]),
        ({"ignore": "lm_head"}, None, ["$.ignore", "list"]),
        (["mxfp4"], None, ["object"]),
    ],
)
def test_refused(request_: object, shorthand: str | None, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_request(request_, shorthand=shorthand)
    assert not [name for name in names if name not in str(raised.value)], raised.value


def test_all_defects_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_request({"targets": {"a": {"weights": "mxfp4"}, "b": "x"}, "ignore": [1], "lineal": "mxfp4"})
    paths = [defect.path for defect in raised.value.defects]
    assert paths == ["$.targets.a.weights", "$.targets.b", "$.ignore[0]", "$.lineal"]
    assert "did you mean 'linear'" in str(raised.value)


def test_a_request_leaves_the_kv_cache_to_the_checkpoint() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "fp8", "kv_cache_scheme": "static"})
    config = QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, source=source)
    assert str(config.kv_cache) == "fp8_e4m3/per_tensor:static"


def test_parser_by_name() -> None:
    request = {"global_quant_config": "mxfp4"}
    assert get_parser("online").parse(request, ModelFacts()) == parsed(request)
    assert get_parser("targets").parse({"targets": {"a": "mxfp4"}}, ModelFacts()) == parsed({"targets": {"a": "mxfp4"}})


class TestNames:
    """vLLM's names of keys."""

    @pytest.mark.parametrize("name", WEIGHT_NAMES)
    def test_weights_go_there_and_back(self, name: str) -> None:
        key = weight_key(name)
        assert vllm_name(key) == name
        assert weight_key(str(key)).same_format(key)
        assert weight_key(f" {name.upper()} ") == key

    @pytest.mark.parametrize("name", ACTIVATION_NAMES)
    def test_activations_go_there_and_back(self, name: str) -> None:
        key = activation_key(name)
        back = vllm_name(key)
        assert back is not None
        assert activation_key(back) == key
        assert activation_key(str(key)) == key

    @pytest.mark.parametrize("word", weight_words())
    def test_every_word_of_a_format_is_a_weight(self, word: str) -> None:
        assert weight_key(word).scale.dynamic is None

    def test_a_key_without_a_name(self) -> None:
        assert vllm_name(QuantKey.parse("int4/group_128")) is None

    def test_words_of_the_vocabulary_write_fp32_scales(self) -> None:
        assert str(weight_key("fp8_e4m3/per_channel").scale.dtype) == "fp32"
        assert str(activation_key("fp8_e4m3/per_token:dynamic").scale.dtype) == "fp32"
