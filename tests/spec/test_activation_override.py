"""Absent, null and a value are three things: the tables of `docs/reference/activation-override.md`, cell by cell."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from quant_spec import ConfigError, QuantizationConfig, QuantKey, ResolveError, formats
from quant_spec.parsers.targets import LayerSpec
from quant_spec.unset import UNSET
from quant_spec.vllm_names import ACTIVATION_NAMES, WEIGHT_NAMES, activation_key, vllm_name, weight_key

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "activation-override.md"
SOURCES = {
    "Over an unquantized checkpoint": None,
    "Over a checkpoint in FP8 blocks with dynamic activations": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
SHORTHANDS = {"without": None, "with": "fp8_per_channel"}
PLACES = {"targets": "model.layers.0.self_attn.o_proj", "linear": "lm_head", "moe": "model.layers.0.mlp.experts"}
GIVEN = {"weight": "mxfp4", "activation": "mxfp8"}


def table(heading: str) -> dict[tuple[str, str], dict[str, str]]:
    """The cells of a table of the page: (weight, activation) -> {shorthand: cell}."""
    lines = PAGE.read_text("utf-8").split(f"### {heading}\n")[1].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    body = rows[2:11]
    return {(row[0], row[1]): {"without": row[2], "with": row[3]} for row in body}


def spec(weight: str, activation: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for key, state in (("weight", weight), ("activation", activation)):
        if state != "absent":
            found[key] = GIVEN[key] if state == "value" else None
    return found


def outcome(place: str, given: object, source: object, shorthand: str | None) -> str:
    """What the library says, in the words of the page."""
    request = {place: {"*o_proj": given} if place == "targets" else given}
    try:
        below = QuantizationConfig.from_dict(source)  # type: ignore[arg-type]
        config = QuantizationConfig.from_online(request, source=below, shorthand=shorthand)
    except ConfigError:
        return "error at parse"
    try:
        decision = config.explain(PLACES[place])
    except ResolveError:
        return "error at resolve"
    assert decision.config == config.resolve(PLACES[place])
    if config is below and source is not None:
        return "source × source"
    return f"{decision.weight_word} × {decision.activation_word}"


STATES = ("absent", "null", "value")


@pytest.mark.parametrize("heading", SOURCES)
def test_the_page_has_every_combination(heading: str) -> None:
    assert set(table(heading)) == set(product(STATES, STATES))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shorthand", SHORTHANDS)
@pytest.mark.parametrize("activation", STATES)
@pytest.mark.parametrize("weight", STATES)
@pytest.mark.parametrize("heading", SOURCES)
def test_cell(heading: str, weight: str, activation: str, shorthand: str, place: str) -> None:
    expected = table(heading)[weight, activation][shorthand]
    assert outcome(place, spec(weight, activation), SOURCES[heading], SHORTHANDS[shorthand]) == expected


@pytest.mark.parametrize("place", PLACES)
def test_a_bare_string_is_a_weight_and_null_leaves_alone(place: str) -> None:
    for source in SOURCES.values():
        for shorthand in SHORTHANDS.values():
            assert outcome(place, "mxfp4", source, shorthand) == outcome(place, {"weight": "mxfp4"}, source, shorthand)
            if place != "targets":
                assert outcome(place, None, source, shorthand) == outcome(place, {"weight": None}, source, shorthand)


def test_absent_and_null_survive_parsing() -> None:
    assert LayerSpec(weight="mxfp4").activation is UNSET
    assert LayerSpec(weight="mxfp4", activation=None).activation is None


def test_an_activation_alone_is_taken_where_the_checkpoint_has_the_same() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": [128, 128]})
    request = {"targets": {"*o_proj": {"activation": "fp8_per_block_dynamic"}}}
    config = QuantizationConfig.from_online(request, source=source)
    decision = config.explain("model.layers.0.self_attn.o_proj")
    assert (decision.weight_word, decision.activation_word) == ("source", "fp8_e4m3/group_128:dynamic")
    assert decision.config.weight == source.global_spec.weight


def test_an_activation_alone_that_differs_names_layer_and_both() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": [128, 128]})
    config = QuantizationConfig.from_online({"targets": {"*o_proj": {"activation": "mxfp8"}}}, source=source)
    with pytest.raises(ResolveError) as caught:
        config.resolve("a.o_proj")
    for part in ("a.o_proj", "mxfp8:dynamic", "fp8_e4m3/group_128:dynamic", "$.targets['*o_proj']"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", [each.name for each in formats()])
def test_an_absent_activation_is_the_formats_default(name: str) -> None:
    quant_format = next(each for each in formats() if each.name == name)
    text = vllm_name(quant_format.weight) or str(quant_format.weight)
    config = QuantizationConfig.from_online({"targets": {"*experts": {"weight": text}}})
    found = config.resolve("a.experts")
    assert found.weight == quant_format.weight
    assert found.activation == quant_format.activation


@pytest.mark.parametrize("name", [*WEIGHT_NAMES])
def test_weight_names_of_vllm_round_trip(name: str) -> None:
    key = weight_key(f" {name.upper()} ")
    assert vllm_name(key) == name
    assert weight_key(str(key)).same_format(key) if "/" in str(key) else str(key) == name


@pytest.mark.parametrize("name", [*ACTIVATION_NAMES])
def test_activation_names_of_vllm_round_trip(name: str) -> None:
    key = activation_key(name)
    found = vllm_name(key)
    assert found is not None
    assert activation_key(found) == key
    assert activation_key(str(key)).same_format(key)


def test_a_key_without_a_name_of_vllm() -> None:
    assert vllm_name(QuantKey.parse("int4/group_32")) is None


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (weight_key, "fp8_e4m3/per_token"),
        (weight_key, "fp8_per_token_dynamic"),
        (weight_key, "mxfp5"),
        (weight_key, "\u212aptpc"),
        (activation_key, "fp8_e4m3/per_channel:dynamic"),
        (activation_key, "fp8_e4m3/block_128x128:static"),
        (activation_key, "fp8_per_channel"),
        (activation_key, "mxfp9"),
    ],
)
def test_words_of_the_wrong_kind_are_refused(read: object, word: str) -> None:
    assert callable(read)
    with pytest.raises(ConfigError, match="unknown") as caught:
        read(word, "$.targets['*'].weight")
    assert caught.value.path == "$.targets['*'].weight"
