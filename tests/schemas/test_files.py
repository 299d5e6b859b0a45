"""The files in `schemas/`: valid, what the code renders, complete for an editor, and complete for a third party."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from check_metaschema import problems
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from quant_spec import QuantFormat, QuantizationConfig, register_format
from quant_spec.formats.base import FORMATS
from quant_spec.quant_key import MXFP6_E2M3
from quant_spec.schema import FILES, render_files, schema_for, validate


def test_files_are_valid_and_up_to_date() -> None:
    assert problems() == []


@pytest.mark.parametrize("kind", FILES)
def test_files_are_package_data(kind: str) -> None:
    text = resources.files("quant_spec.schemas").joinpath(f"{kind}.schema.json").read_text("utf-8")
    assert json.loads(text) == schema_for(kind)


@pytest.mark.parametrize("kind", ["online", "targets", "quark", "generic"])
def test_every_key_is_explained(kind: str) -> None:
    def silent(schema: object, path: str) -> list[str]:
        if isinstance(schema, list):
            return [line for index, each in enumerate(schema) for line in silent(each, f"{path}/{index}")]
        if not isinstance(schema, dict):
            return []
        properties = schema.get("properties", {})
        unexplained = [f"{path}/{key}" for key, each in properties.items() if "description" not in each]
        inner = [line for key, each in properties.items() for line in silent(each, f"{path}/{key}")]
        return [
            *unexplained,
            *inner,
            *(line for name, each in schema.get("$defs", {}).items() for line in silent(each, name)),
        ]

    assert schema_for(kind)["title"]
    assert silent(schema_for(kind), kind) == []


def test_a_plain_validator_reads_the_files() -> None:
    files = {name: Resource.from_contents(json.loads(text)) for name, text in render_files().items()}
    registry = Registry().with_resources(files.items())
    schema = files["online.schema.json"].contents
    validator = Draft202012Validator(schema, registry=registry)
    for example in schema["examples"]:
        assert validator.is_valid(example)
    assert not validator.is_valid({"global_quant_config": "mxfp5"})
    assert not validator.is_valid({"exclude_layers": []})


def test_a_registered_format_is_a_word_of_the_schema() -> None:
    added = QuantFormat(name="test_fp6", summary="FP6", weight=MXFP6_E2M3, activation=None, aliases=("test_six",))
    request = {"global_quant_config": " Test_FP6", "layer_quant_config": {"*": "test_six"}}
    assert validate(request, "online")
    register_format(added)
    try:
        assert validate(request, "online") == []
        assert str(QuantizationConfig.from_online(request).global_spec.weight) == "mxfp6_e2m3"
    finally:
        FORMATS.unregister(added.name)
    assert validate(request, "online")
