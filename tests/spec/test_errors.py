"""Errors: where, what, what is allowed, the nearest match; all defects in one exception."""

from __future__ import annotations

import pickle

import pytest

from quant_spec import ConfigError, Defect, LoadError, PlanError, QuantizationConfig, QuantSpecError, ResolveError
from quant_spec.errors import join_path, json_type, nearest, shown, unknown, wrong_type


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (1.5, "1.5"),
        ("a", "'a'"),
        ("a\n\x1b[31m", r"'a\n\x1b[31m'"),
        ("\ud800", r"'\ud800'"),
        ({"a": [1]}, "{'a': [1]}"),
        ("x" * 500, f"'{'x' * 119}… (502 characters)"),
    ],
)
def test_values_are_shown_on_one_line(value: object, text: str) -> None:
    assert shown(value) == text
    shown(value).encode()


def test_values_without_end_are_cut() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[[[[[...]]]]]]]"
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(shown({str(number): [number] * 50 for number in range(10**5)})) == 121
    assert shown([1] * 30) == f"[{'1, ' * 24}...]"


@pytest.mark.parametrize(
    ("value", "found"),
    [("mxpf4", "mxfp4"), (" MXFP4 ", "mxfp4"), ("zzz", None), (5, None), ("m" * 200, None), ("PTPC-FP8", "Ptpc_Fp8")],
)
def test_nearest(value: object, found: str | None) -> None:
    assert nearest(value, ["mxfp4", "Ptpc_Fp8", "nvfp4"]) == found


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, "null"), (True, "boolean"), (3, "number"), (0.5, "number"), ("", "string"), ({}, "object"), ([], "list")],
)
def test_json_types(value: object, name: str) -> None:
    assert json_type(value) == name


def test_types_outside_json_are_named_as_python_does() -> None:
    assert json_type({1}) == "set"
    assert json_type(()) == "list"


@pytest.mark.parametrize(
    ("key", "path"),
    [("weight", "$.weight"), (0, "$[0]"), ("*.mlp", "$['*.mlp']"), ("", "$['']"), ("a'b", '$["a\'b"]')],
)
def test_paths(key: str | int, path: str) -> None:
    assert join_path("$", key) == path


def test_a_defect_is_one_line() -> None:
    defect = Defect("$.a", "unknown word 'x'", "x", ("y", "z"), "did you mean 'y'?", "online.schema.json#/a")
    assert str(defect) == "$.a: unknown word 'x'; allowed: y, z; did you mean 'y'? [online.schema.json#/a]"
    assert str(Defect("$", "wrong")) == "$: wrong"


def test_long_lists_of_choices_are_cut() -> None:
    text = str(unknown("$", "thing", "q", [f"word{number}" for number in range(100)]))
    assert text.endswith("word23 and 76 more")


def test_wrong_type_says_what_was_found() -> None:
    assert str(wrong_type("$.a", None, "list")) == "$.a: expected list, found null"
    assert str(wrong_type("$.a", [1], "string", "object")) == "$.a: expected string or object, found list [1]"


def test_an_error_carries_every_defect() -> None:
    defects = [Defect("$.a", "first", 1, ("2",), "try 2"), Defect("$.b", "second")]
    error = ConfigError(defects)
    assert str(error) == "$.a: first; allowed: 2; try 2\n$.b: second"
    assert (error.path, error.value, error.expected, error.hint) == ("$.a", 1, ("2",), "try 2")
    assert error.defects == tuple(defects)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
    assert again.defects == error.defects
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", [ConfigError, ResolveError, PlanError, LoadError])
def test_every_error_is_ours_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, QuantSpecError)
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize(
    ("word", "members"),
    [("fp8", {"mxfp8", "per_block_fp8", "ptpc_fp8"}), ("FP4 ", {"mxfp4", "nvfp4"}), ("mx", {"mxfp4", "mxfp8"})],
)
def test_a_family_of_formats_lists_its_members(word: str, members: set[str]) -> None:
    requests: list[dict[str, object]] = [{"global_quant_config": word}, {"layer_quant_config": {"*": word}}]
    for request in requests:
        with pytest.raises(ConfigError) as caught:
            QuantizationConfig.from_online(request)
        listed = caught.value.hint.partition(" could be ")[2].partition(":")[0]
        assert members <= set(listed.replace(" or ", ", ").split(", "))
        assert "did you mean" not in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig.from_online({"targets": {"*": "mxfp"}})
    assert "could be mxfp4" in caught.value.hint


def test_a_word_that_is_near_one_format_is_still_taken_for_it() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'mxfp[48]'"):
        QuantizationConfig.from_online({"global_quant_config": "mxfp5"})
    with pytest.raises(ConfigError, match="did you mean 'ptpc_fp8'"):
        QuantizationConfig.from_online({"global_quant_config": "ptpc_f8"})
