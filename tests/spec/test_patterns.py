"""Entries of lists and tables: what each covers, said with the examples of the documents."""

from __future__ import annotations

import pickle
import re

import attrs
import pytest

from quant_spec import ConfigError, Pattern, PatternKind, Scope
from quant_spec.globs import Wild, glob_tokens
from quant_spec.patterns import ancestors_and_self, compile_regex, containers, empty_entry

GATE = "model.layers.3.mlp.gate"
GATE_PROJ = "model.layers.3.mlp.gate_proj"
EXPERT = "model.layers.3.mlp.experts.7.up_proj"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("lm_head", PatternKind.LITERAL),
        ("model.layers.0", PatternKind.LITERAL),
        ("*.mlp.*", PatternKind.GLOB),
        ("layers.?", PatternKind.GLOB),
        ("[ab]", PatternKind.GLOB),
        ("re:.*", PatternKind.REGEX),
        ("re:*.x", None),
        ("Linear", PatternKind.CLASS),
        ("Model.layers", PatternKind.LITERAL),
        ("", PatternKind.LITERAL),
    ],
)
def test_the_kind_is_in_the_text(text: str, kind: PatternKind | None) -> None:
    if kind is None:
        with pytest.raises(ConfigError, match="does not compile"):
            Pattern.parse(text, "$")
    else:
        assert Pattern.parse(text, "$", classes=True).kind is kind
        assert str(Pattern.parse(text, "$")) == text


@pytest.mark.parametrize(
    ("text", "scope", "name", "covered"),
    [
        ("model.layers.1", Scope.SUBTREE, "model.layers.1", True),
        ("model.layers.1", Scope.SUBTREE, "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", Scope.SUBTREE, "model.layers.10", False),
        ("model.layers.1", Scope.SUBTREE, "model.layers.10.mlp", False),
        ("layers.1", Scope.SUBTREE, "model.layers.1", False),
        ("gate", Scope.SUBTREE, GATE, True),
        ("gate", Scope.SUBTREE, GATE_PROJ, False),
        ("vision_tower", Scope.SUBTREE, "model.vision_tower.blocks.0", True),
        ("model.layers.3.mlp.gate", Scope.SUBTREE, "model.layers.3.mlp", False),
        ("model.layers.1", Scope.EXACT, "model.layers.1", True),
        ("model.layers.1", Scope.EXACT, "model.layers.1.mlp", False),
        ("model.layers.3.mlp.experts", Scope.EXACT, EXPERT, True),
        ("gate", Scope.EXACT, GATE, False),
        ("layers.1", Scope.RUN, "model.layers.1.mlp", True),
        ("layers.1", Scope.RUN, "model.layers.11.mlp", False),
        ("mlp.gate", Scope.RUN, GATE, True),
        ("mlp.gate", Scope.RUN, GATE_PROJ, False),
        ("", Scope.RUN, "model", False),
        ("", Scope.SUBTREE, "model", False),
        ("*.gate.*", Scope.SUBTREE, GATE, True),
        ("*.gate.*", Scope.SUBTREE, GATE_PROJ, False),
        ("model.layers.*.self_attn", Scope.SUBTREE, "model.layers.9.self_attn.q_proj", True),
        ("*.MLP.*", Scope.SUBTREE, "model.layers.3.mlp.up_proj", False),
        ("*.experts", Scope.SUBTREE, EXPERT, True),
        ("re:model.layers", Scope.SUBTREE, GATE, True),
        ("re:layers", Scope.SUBTREE, GATE, False),
        ("re:.*gate$", Scope.SUBTREE, GATE, True),
        ("re:.*gate$", Scope.SUBTREE, GATE_PROJ, False),
        ("re:.*experts$", Scope.SUBTREE, EXPERT, True),
        ("re:.*mlp$", Scope.SUBTREE, EXPERT, False),
    ],
)
def test_coverage(text: str, scope: Scope, name: str, covered: bool) -> None:  # noqa: FBT001
    assert Pattern.parse(text, "$", scope).covers(name) is covered


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(
    "texts",
    [(), ("a", "", "b.c"), ("a", "*b", "", "re:c"), ("re:x",), ("", ""), ("a\nb", "\n"), ("Linear", "x")],
)
def test_a_list_is_its_entries_one_by_one(texts: tuple[str, ...], scope: Scope) -> None:
    for classes in (False, True):
        one_by_one = tuple(
            Pattern.parse(text, f"$.e[{index}]", scope, classes=classes) for index, text in enumerate(texts) if text
        )
        together = Pattern.parse_all(texts, "$.e", scope, classes=classes)
        assert together == one_by_one
        assert [*map(attrs.astuple, together)] == [*map(attrs.astuple, one_by_one)]
        assert [*map(hash, together)] == [*map(hash, one_by_one)]


def test_classes_and_slots() -> None:
    linear = Pattern.parse("Linear", "$.targets[0]", classes=True)
    assert linear.covers("anything", "Linear")
    assert not linear.covers("Linear", "Conv1d")
    assert not linear.covers("Linear")
    moe = Pattern.slot("moe", "$.moe")
    assert moe.covers(EXPERT)
    assert not moe.covers(GATE)
    assert moe.covers("experts")
    assert not moe.covers("a.shared_experts.up_proj")


def test_a_renamed_entry_still_prints_as_written() -> None:
    entry = Pattern.parse("transformer.h.0", "$.ignore[0]").renamed("model.layers.0")
    assert entry.text == str(entry) == "transformer.h.0"
    assert entry.covers("model.layers.0.mlp")
    assert not entry.covers("transformer.h.0")
    assert pickle.loads(pickle.dumps(entry)) == entry  # noqa: S301  (made here)


def test_paths_above() -> None:
    assert ancestors_and_self("a") == ["a"]
    assert ancestors_and_self("a.b.c") == ["a", "a.b", "a.b.c"]
    assert containers(EXPERT) == ["model.layers.3.mlp.experts"]
    assert containers("model.layers.3.mlp.experts") == []
    assert containers("a.shared_experts.b") == []
    assert containers(GATE) == []


def test_expressions_are_compiled_once() -> None:
    assert compile_regex("abc.*") is compile_regex("abc.*")


def test_an_empty_key_is_an_error_of_its_place() -> None:
    assert str(empty_entry("$.layer_quant_config['']")).startswith("$.layer_quant_config['']: empty pattern ''")


@pytest.mark.parametrize(
    ("glob", "tokens"),
    [
        ("a*?", ["a", Wild.MANY, Wild.ONE]),
        ("**", [Wild.MANY]),
        ("[", ["["]),
        ("[]", ["[", "]"]),
        ("[!]", ["[", "!", "]"]),
        ("[a", ["[", "a"]),
    ],
)
def test_tokens_of_globs(glob: str, tokens: list[object]) -> None:
    assert glob_tokens(glob) == tokens


def test_a_bracket_is_one_token() -> None:
    (token,) = glob_tokens("[]ab]")
    assert isinstance(token, re.Pattern)
    assert [bool(token.match(each)) for each in "]abc"] == [True, True, True, False]
