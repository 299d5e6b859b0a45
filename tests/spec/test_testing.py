"""The public strategies: what they draw is what their names say, and reaches the corners."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st

from quant_spec import ConfigError, NameRules, Pattern, PatternKind, QuantizationConfig, ResolveError
from quant_spec.regexes import parse_regex
from quant_spec.testing import (
    MODEL_FAMILIES,
    backtracking_regexes,
    checkpoint_configs,
    entries,
    free_names,
    globs,
    linear_regexes,
    literals,
    module_names,
    name_rules,
    online_requests,
    plain_outcome,
    requests,
    targets_requests,
    weights,
)

settings = hypothesis.settings(deadline=None, max_examples=60)


def test_importing_the_strategies_leaves_torch_alone() -> None:
    code = "import sys, quant_spec.testing as t; t.weights(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_families(name: str) -> None:
    family = MODEL_FAMILIES[name]
    names = family.checkpoint_names(3, 4)
    assert len(set(names)) == len(names)
    serving = family.serving_names(3)
    fused = {whole for whole, _ in family.packed}
    assert {each.rpartition(".")[2] for each in serving} & fused
    shards = {shard for _, leaves in family.packed for shard in leaves}
    assert not {each.rpartition(".")[2] for each in serving} & shards
    rules = family.rules(4)
    assert rules.num_experts == (4 if family.expert_leaves else None)
    if family.expert_leaves:
        assert sum(each.endswith(f".{family.experts}") for each in serving) >= 2
        assert sum(f".{family.experts}." in each for each in names) % (4 * len(family.expert_leaves)) == 0


@settings
@given(module_names(), module_names(MODEL_FAMILIES["Llama"]), free_names())
def test_names_resolve(any_name: str, llama: str, free: str) -> None:
    config = QuantizationConfig.from_online({"global_quant_config": "mxfp4"})
    for name in (any_name, llama, free):
        assert config.resolve(name).is_quantized
    names = MODEL_FAMILIES["Llama"]
    assert llama in {*names.checkpoint_names(3, 3), *names.serving_names(3)}


@settings
@given(globs(), linear_regexes(), backtracking_regexes())
def test_expressions_are_what_they_say(glob: str, linear: str, other: str) -> None:
    Pattern.parse(glob, "$")
    assert parse_regex(linear).linear
    try:
        assert not parse_regex(other).linear
    except ConfigError as error:
        assert "could take too long" in str(error)  # noqa: PT017  (either is a right answer)


@settings
@given(st.data())
def test_entries_have_to_do_with_the_names(data: st.DataObject) -> None:
    names = MODEL_FAMILIES["DeepSeek-V3"].checkpoint_names()
    literal = data.draw(literals(names))
    assert any(f".{literal}." in f".{name}." for name in names)
    assert Pattern.parse(literal, "$").kind is PatternKind.LITERAL


@pytest.mark.parametrize("kind", [PatternKind.LITERAL, PatternKind.GLOB, PatternKind.REGEX])
def test_entries_of_every_kind_occur(kind: PatternKind) -> None:
    names = MODEL_FAMILIES["Llama"].checkpoint_names()
    found = find(
        entries(names),
        lambda text: (
            Pattern.parse(text, "$").kind is kind and any(Pattern.parse(text, "$").covers(name) for name in names)
        ),
        settings=hypothesis.settings(database=None, deadline=None, max_examples=2000),
    )
    assert found


@settings
@given(online_requests(), targets_requests(), requests(), checkpoint_configs(), name_rules(), name_rules(renames=False))
def test_documents_are_accepted(
    online: dict[str, object],
    targets: dict[str, object],
    either: dict[str, object],
    checkpoint: dict[str, object] | None,
    rules: NameRules,
    plain: NameRules,
) -> None:
    source = QuantizationConfig.from_dict(checkpoint, names=rules)
    for request in (online, targets, either):
        QuantizationConfig.from_online(request, source=source)
    assert plain.name_mapping == ()


def test_the_plain_rules_know_disagreement() -> None:
    rules = NameRules(packed_modules_mapping={"qkv": ["q", "k"]})
    config = QuantizationConfig.from_online({"layer_quant_config": {"a.q": "mxfp4"}}, names=rules)
    with pytest.raises(ResolveError, match="disagree"):
        plain_outcome(config, "a.qkv")


@settings
@given(weights(k_multiple=16, max_rows=5, max_groups=3), weights(stacked=True))
def test_weights_are_finite_and_of_the_right_shape(flat: torch.Tensor, stacked: torch.Tensor) -> None:
    assert flat.ndim == 2
    assert flat.shape[1] % 16 == 0
    assert stacked.ndim == 3
    assert stacked.shape[2] % 32 == 0
    assert flat.dtype in {torch.bfloat16, torch.float16, torch.float32}
    assert flat.isfinite().all()
    assert stacked.isfinite().all()


@pytest.mark.parametrize(
    "wanted",
    [
        lambda weight: not weight.any(),
        lambda weight: bool((weight.signbit() & (weight == 0)).any()),
        lambda weight: bool((weight.abs() == torch.finfo(weight.dtype).max).any()),
        lambda weight: bool(((weight != 0) & (weight.abs() < torch.finfo(weight.dtype).tiny)).any()),
        lambda weight: bool((weight == 0).all(1).any() and weight.any()),
    ],
    ids=["zeros", "minus zero", "greatest", "subnormal", "a zero row"],
)
def test_weights_reach_the_corners(wanted: object) -> None:
    assert callable(wanted)
    found = find(
        weights(max_rows=8, max_groups=1),
        wanted,
        settings=hypothesis.settings(database=None, deadline=None, max_examples=2000),
    )
    assert wanted(found)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_bad_values_where_asked_for(bad: str) -> None:
    value = float(bad)
    found = find(
        weights(bad_values=True, max_rows=3, max_groups=1),
        lambda weight: bool(weight.isnan().any() if bad == "nan" else (weight == value).any()),
        settings=hypothesis.settings(database=None, deadline=None, max_examples=2000),
    )
    assert not found.isfinite().all()
