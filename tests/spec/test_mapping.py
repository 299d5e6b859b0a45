"""Names: renames, fused modules, expert containers; values that never change."""

from __future__ import annotations

import copy
import pickle

import attrs
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant_spec import ConfigError, NameRules
from quant_spec.mapping import RenameRule, is_container
from quant_spec.testing import free_names, model_families, name_mappings

settings = hypothesis.settings(deadline=None, max_examples=150)


@pytest.mark.parametrize(
    ("mapping", "name", "mapped"),
    [
        ({"model.": "language_model.model."}, "model.layers.0", "language_model.model.layers.0"),
        ({"model": "m"}, "model", "m"),
        ({"model": "m"}, "models.layers", "models.layers"),
        ({"model.": ""}, "model.layers.0", "layers.0"),
        ({"model.": ""}, "a.model.layers.0", "a.model.layers.0"),
        ({".block": ".mlp"}, "model.block.0", "model.mlp.0"),
        ({".block": ".mlp"}, "block.0", "mlp.0"),
        ({".block": ".mlp"}, "model.blocks.0", "model.blocks.0"),
        ({".a.b": ".c"}, "x.a.b.a.b", "x.c.a.b"),
        ({"model.": "one.", "model.layers.": "two."}, "model.layers.0", "two.0"),
        ({"model.layers.": "two.", "model.": "one."}, "model.norm", "one.norm"),
        ({"a": "b", "b": "c"}, "a.x", "b.x"),
    ],
)
def test_renames(mapping: dict[str, str], name: str, mapped: str) -> None:
    assert NameRules(name_mapping=mapping).to_module(name) == mapped


@settings
@given(model_families(), st.data())
def test_checkpoint_names_are_those_that_the_mapping_sends_here(family: object, data: st.DataObject) -> None:
    names = family.checkpoint_names(2, 2)  # type: ignore[attr-defined]
    rules = NameRules(name_mapping=data.draw(name_mappings(names)))
    name = data.draw(st.sampled_from(names))
    for found in rules.to_checkpoint(name):
        assert found != name
        assert rules.to_module(found) == name
    module = rules.to_module(name)
    assert module == name or name in rules.to_checkpoint(module)


@settings
@given(free_names(), st.sampled_from(["a", "a.b", ".a", ".a.", "1."]), st.sampled_from(["x.", ".x", "", "y.z"]))
def test_a_rule_and_its_reverse(name: str, old: str, new: str) -> None:
    rule = RenameRule.parse(old, new)
    for at in rule.places(name):
        renamed = rule.apply(name, at)
        back = rule.reversed()
        if rule.new:
            assert name in {back.apply(renamed, place) for place in back.places(renamed)}
        elif not rule.anywhere:
            assert back.apply(renamed, 0) == name


def test_a_rule_to_nothing_is_undone_at_the_start_alone() -> None:
    assert NameRules(name_mapping={"model.": ""}).to_checkpoint("layers.0") == ("model.layers.0",)
    assert NameRules(name_mapping={".model": ""}).to_checkpoint("layers.0") == ()


@pytest.mark.parametrize("old", ["", ".", ".."])
def test_a_rule_of_nothing_is_refused(old: str) -> None:
    with pytest.raises(ConfigError, match="empty rule"):
        NameRules(name_mapping={old: "x"})


def test_all_defects_of_a_mapping_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        NameRules(name_mapping={"a": 1, "": "b"})  # type: ignore[dict-item]
    assert len(caught.value.defects) == 2
    assert "name_mapping['a']" in str(caught.value)


def test_shards() -> None:
    rules = NameRules(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert rules.shards("a.qkv_proj") == ("a.q_proj", "a.k_proj", "a.v_proj")
    assert rules.shards("qkv_proj") == ("q_proj", "k_proj", "v_proj")
    assert rules.shards("a.qkv_proj.b") == ()
    assert rules.shards("a.q_proj") == ()


def test_rules_are_values() -> None:
    mapping = {"a": "b"}
    rules = NameRules(name_mapping=mapping, packed_modules_mapping={"f": ["x"]}, tensors=["a.weight"])
    mapping["c"] = "d"
    assert rules.name_mapping == (("a", "b"),)
    same = NameRules(name_mapping=(("a", "b"),), packed_modules_mapping=(("f", ("x",)),), tensors={"a.weight"})
    assert same == rules
    assert hash(same) == hash(rules)
    assert rules.to_module("a") == "b"
    for other in (copy.copy(rules), copy.deepcopy(rules), pickle.loads(pickle.dumps(rules))):  # noqa: S301  (made here)
        assert other == rules
        assert other.to_module("a") == "b"
    changed = rules.with_modules(num_experts=4)
    assert (changed.num_experts, rules.num_experts) == (4, None)
    assert changed.name_mapping == rules.name_mapping
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        rules.num_experts = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "found"),
    [("a.experts", True), ("experts", True), ("a.experts.0", False), ("a.shared_experts", False)],
)
def test_containers(name: str, found: bool) -> None:  # noqa: FBT001
    assert is_container(name) is found
