"""Laws of resolution, over generated requests, checkpoints and names of real model families."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import attrs
import hypothesis
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quant_spec import (
    ConfigError,
    LayerQuantConfig,
    NameRules,
    QuantizationConfig,
    ResolveError,
    Why,
)
from quant_spec.testing import (
    ModelFamily,
    checkpoint_configs,
    entries,
    free_names,
    model_families,
    name_rules,
    plain_outcome,
    plain_resolve,
    requests,
)

if TYPE_CHECKING:
    from collections.abc import Callable

settings = hypothesis.settings(deadline=None, max_examples=60)


@attrs.frozen
class Setting:
    """A config, what it was made of, and the names of the model that it is for."""

    config: QuantizationConfig
    names: tuple[str, ...]


def _config(request: dict[str, object], source: dict[str, object] | None, rules: NameRules) -> QuantizationConfig:
    try:
        below = QuantizationConfig.from_dict(source, names=rules)
        return QuantizationConfig.from_online(request, source=below)
    except ConfigError as error:
        assume("backtracking" not in str(error))
        raise


@st.composite
def settings_of_models(draw: st.DrawFn, *, requested: bool | None = None) -> Setting:
    """Draw a config (a request over a checkpoint, or a checkpoint alone) and the names of its model."""
    family: ModelFamily = draw(model_families())
    rules = draw(name_rules(family))
    names = (*family.checkpoint_names(2, 2), *family.serving_names(2))
    spelled = tuple(dict.fromkeys((*names, *map(rules.to_module, names))))
    source = draw(checkpoint_configs(names))
    request = draw(requests(spelled)) if requested is not False else {}
    if requested is None and draw(st.booleans()):
        request = {}
    return Setting(_config(request, source, rules), spelled)


def answer(ask: Callable[[], LayerQuantConfig]) -> LayerQuantConfig | None:
    """The format, or None where the module has none that all its members share."""
    try:
        return ask()
    except ResolveError:
        return None


@settings
@given(settings_of_models(), st.lists(free_names(), max_size=3))
def test_resolve_is_what_the_plain_rules_say(setting: Setting, extra: list[str]) -> None:
    config = setting.config
    for name in (*setting.names, *extra):
        expected = answer(lambda name=name: plain_resolve(config, name))
        assert answer(lambda name=name: config.resolve(name)) == expected, name
        assert answer(lambda name=name: config.resolve_afresh(name)) == expected, name
        assert answer(lambda name=name: config.explain(name).config) == expected, name


@settings
@given(settings_of_models())
def test_the_entry_that_decides_is_the_plain_rules_one(setting: Setting) -> None:
    matcher = setting.config.matcher
    for name in setting.names:
        try:
            expected = plain_outcome(setting.config, name)
        except ResolveError:
            with pytest.raises(ResolveError):
                matcher.outcome(name)
            continue
        found = matcher.outcome(name)
        assert (found.why, found.spec) == (expected.why, expected.spec), name
        assert found.entry == expected.entry, name


@settings
@given(settings_of_models(), st.randoms())
def test_resolve_many_is_resolve_of_each(setting: Setting, shuffler: st.DataObject) -> None:
    config = setting.config
    good = [name for name in setting.names if answer(lambda name=name: plain_resolve(config, name)) is not None]
    bad = [name for name in setting.names if name not in good]
    shuffler.shuffle(good)  # type: ignore[attr-defined]
    fresh = pickle.loads(pickle.dumps(config))  # noqa: S301  (made here)
    assert list(fresh.resolve_many(good)) == good
    assert fresh.resolve_many(good) == {name: config.resolve(name) for name in good}
    if bad:
        with pytest.raises(ResolveError, match=bad[0]):
            fresh.resolve_many([*good, *bad])


@settings
@given(settings_of_models())
def test_an_exclude_comes_before_everything_else(setting: Setting) -> None:
    config = setting.config
    for name in setting.names:
        if not any(entry.covers(name) for entry in config.exclude_layers) or config.names.name_mapping:
            continue
        if config.matcher.members(name) or answer(lambda name=name: config.resolve(name)) is None:
            continue
        decision = config.explain(name)
        assert decision.why is Why.EXCLUDE
        assert decision.config == decision.source or not decision.config.is_quantized


@settings
@given(settings_of_models(requested=True), st.data())
def test_one_more_exclude_never_quantizes_more(setting: Setting, data: st.DataObject) -> None:
    config = setting.config
    try:
        more = config.with_excludes(*data.draw(st.lists(entries(setting.names), min_size=1, max_size=3)))
    except ConfigError:
        assume(False)  # noqa: FBT003  (hypothesis's own way to give up an input)
        raise
    for name in setting.names:
        before, after = (answer(lambda name=name, each=each: each.resolve(name)) for each in (config, more))
        if before is None or after is None:
            continue
        source = config.source.resolve(name) if config.source else LayerQuantConfig()
        assert after.weight in {before.weight, source.weight if config.source else None}, name


@settings
@given(settings_of_models(requested=True))
def test_the_first_pattern_that_covers_wins(setting: Setting) -> None:
    config = setting.config
    for name in setting.names:
        if config.matcher.members(name) or answer(lambda name=name: config.resolve(name)) is None:
            continue
        decision = config.explain(name)
        covering = [entry for entry, _ in config.layer_pattern_specs if entry.covers(name)]
        if any(entry.covers(name) for entry in config.exclude_layers) or not covering:
            assert decision.entry not in covering or decision.why is Why.EXCLUDE
        else:
            assert decision.entry == covering[0]


@settings
@given(model_families(), st.data())
def test_remapping_then_resolving_is_resolving_the_mapped_name(family: ModelFamily, data: st.DataObject) -> None:
    """Literals of a checkpoint are renamed: asked by module name, it answers as the original by checkpoint name."""
    names = family.checkpoint_names(2, 2)
    listed = data.draw(st.lists(st.sampled_from(names), max_size=4))
    document = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": listed}
    mapping = dict(family.prefix_mapping) or {"model.": "language_model.model."}
    original = QuantizationConfig.from_dict(document)
    remapped = original.remapped(mapping)
    to_module = remapped.names.to_module
    for name in names:
        assert remapped.resolve(to_module(name)) == original.resolve(name), name


@settings
@given(settings_of_models())
def test_remapping_twice_is_remapping_once(setting: Setting) -> None:
    config = setting.config
    before = config.digest()
    mapping = {"language_model.model.": "model.", ".block_sparse_moe": ".mlp"}
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    once = config.remapped(mapping, packed)
    twice = once.remapped(mapping, packed)
    assert twice == once
    assert twice.digest() == once.digest()
    assert config.digest() == before
    for name in setting.names:
        assert answer(lambda name=name: twice.resolve(name)) == answer(lambda name=name: once.resolve(name))


@settings
@given(settings_of_models())
def test_dumping_and_parsing_again_is_the_identity(setting: Setting) -> None:
    config = setting.config
    source = config.source or config
    below = QuantizationConfig.from_dict(json.loads(json.dumps(source.to_dict())), names=source.names)
    assert below == source
    if config.source is not None:
        dumped = json.loads(json.dumps(config.to_dict()))
        again = QuantizationConfig.from_online(dumped["request"], source=below, shorthand=dumped["shorthand"])
        assert again == config
        assert again.digest() == config.digest()
        assert hash(again) == hash(config)


@settings
@given(settings_of_models(requested=True))
def test_the_digest_ignores_the_order_of_excludes_and_sees_that_of_patterns(setting: Setting) -> None:
    config = setting.config
    backwards = attrs.evolve(config, exclude_layers=config.exclude_layers[::-1])
    assert backwards.digest() == config.digest()
    for name in setting.names:
        assert answer(lambda name=name: backwards.resolve(name)) == answer(lambda name=name: config.resolve(name))
    patterns = config.layer_pattern_specs
    turned = attrs.evolve(config, layer_pattern_specs=patterns[::-1])
    meant = [(entry.kind, entry.target, spec) for entry, spec in patterns]
    assert (turned.digest() == config.digest()) == (meant == meant[::-1])


@settings
@given(settings_of_models(), settings_of_models())
def test_configs_of_one_digest_give_the_same_answers(one: Setting, two: Setting) -> None:
    """And therefore answers that differ have digests that differ."""
    names = (*one.names, *two.names)
    pairs = [
        (answer(lambda name=name: one.config.resolve(name)), answer(lambda name=name: two.config.resolve(name)))
        for name in names
    ]
    if any(left != right for left, right in pairs):
        assert one.config.digest() != two.config.digest()


@settings
@given(settings_of_models(), st.data())
def test_every_change_of_an_answer_changes_the_digest(setting: Setting, data: st.DataObject) -> None:
    """Small steps from one config: where two unrelated ones would differ anyway."""
    config = setting.config
    name = data.draw(st.sampled_from(setting.names))
    changed = data.draw(
        st.sampled_from(
            [
                config.with_excludes(name),
                config.remapped({"model.": "other."}),
                config.remapped(packed_modules_mapping={"qkv_proj": ["q_proj"]}),
                attrs.evolve(config, global_spec=LayerQuantConfig()),
                attrs.evolve(config, layer_pattern_specs=config.layer_pattern_specs[1:]),
                attrs.evolve(config, names=attrs.evolve(config.names, num_experts=1)),
            ]
        )
    )
    differs = any(
        answer(lambda each=each: config.resolve(each)) != answer(lambda each=each: changed.resolve(each))
        for each in setting.names
    )
    assert not differs or changed.digest() != config.digest()


@settings
@given(settings_of_models())
def test_unmatched_entries_cover_none_of_the_names(setting: Setting) -> None:
    config = setting.config
    unmatched = config.unmatched(setting.names)
    for entry in config.matcher.entries:
        if not entry.text or config.names.name_mapping:
            continue
        fits = any(
            entry.covers(each, "Linear") for name in setting.names for each in (name, *config.matcher.members(name))
        )
        assert (entry in unmatched) == (not fits), entry
