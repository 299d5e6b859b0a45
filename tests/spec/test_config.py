"""QuantizationConfig as an object: making, changing, asking, copying, printing."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from quant_spec import (
    ConfigError,
    LayerQuantConfig,
    ModelFacts,
    ModuleInfo,
    NameRules,
    QuantizationConfig,
    ResolveError,
    Why,
    get_format,
)
from quant_spec import answers as answers_module
from quant_spec import resolver as resolver_module
from quant_spec.testing import MODEL_FAMILIES, plain_resolve

REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*expert*": "mxfp4", "re:.*kv_b_proj$": "mxfp8"},
    "exclude_layer": ["lm_head", "*.gate.*"],
}
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
DEEPSEEK = MODEL_FAMILIES["DeepSeek-V3"]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PTPC = get_format("ptpc_fp8").weight


@pytest.fixture
def config() -> QuantizationConfig:
    """The seeds' request over a DeepSeek checkpoint in FP8 blocks."""
    source = QuantizationConfig.from_dict(BLOCK_FP8, names=DEEPSEEK.rules())
    return QuantizationConfig.from_online(REQUEST, source=source)


# -- making -----------------------------------------------------------------------------------------------------------


def test_no_config_is_unquantized() -> None:
    config = QuantizationConfig.from_dict(None, facts=ModelFacts(torch_dtype="float16"))
    assert config.quant_method is None
    assert config.source_dtype == "float16"
    assert not config.resolve("a").is_quantized
    assert config.to_dict() is None
    assert config == QuantizationConfig(source_dtype="float16")


@pytest.mark.parametrize("value", [[], "fp8", 3, True])
def test_a_config_is_an_object(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^\$: expected object or null"):
        QuantizationConfig.from_dict(value)  # type: ignore[arg-type]


def test_an_empty_object_is_unquantized_and_is_dumped() -> None:
    config = QuantizationConfig.from_dict({})
    assert config.quant_method is None
    assert config.to_dict() == {}


def test_documents_are_copied() -> None:
    document = {"quant_method": "fp8", "ignored_layers": ["a"], "extra": {"b": [1, (2, None)], "c": True}}
    config = QuantizationConfig.from_dict(document)
    document["ignored_layers"].append("z")  # type: ignore[attr-defined]
    dumped = config.to_dict()
    assert dumped == {"quant_method": "fp8", "ignored_layers": ["a"], "extra": {"b": [1, [2, None]], "c": True}}
    dumped["ignored_layers"].append("y")  # type: ignore[index]
    assert config.to_dict() != dumped


def test_a_document_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds a (set|bytes|object), which JSON cannot say"):
        QuantizationConfig.from_dict({"quant_method": "fp8", "extra": b"x"})


@pytest.mark.parametrize("request_", [None, {}])
def test_an_empty_request_is_its_source(request_: object) -> None:
    source = QuantizationConfig.from_dict(BLOCK_FP8)
    assert QuantizationConfig.from_online(request_, source=source) is source
    rules = NameRules(num_experts=8)
    assert QuantizationConfig.from_online(request_, source=source, names=rules).names is rules


def test_requests_do_not_stack(config: QuantizationConfig) -> None:
    with pytest.raises(ConfigError, match="cannot be layered over another request"):
        QuantizationConfig.from_online(REQUEST, source=config)


def test_a_method_that_cannot_be_converted_is_named() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False})
    with pytest.raises(ConfigError, match="'gptq' cannot be converted"):
        QuantizationConfig.from_online(REQUEST, source=source)


def test_names_given_with_a_request_hold_for_the_source_too() -> None:
    source = QuantizationConfig.from_dict(BLOCK_FP8)
    rules = NameRules(packed_modules_mapping=PACKED)
    config = QuantizationConfig.from_online(REQUEST, source=source, names=rules)
    assert config.names is rules
    assert config.source is not None
    assert config.source.names is rules
    assert source.names == NameRules()


# -- changing ---------------------------------------------------------------------------------------------------------


def test_every_change_is_a_new_object(config: QuantizationConfig) -> None:
    before = config.digest(), repr(config)
    remapped = config.remapped({"model.": "m."}, PACKED)
    fewer = config.with_excludes("model.layers.0", "re:.*o_proj", "*.1.*")
    assert (config.digest(), repr(config)) == before
    assert len({config.digest(), remapped.digest(), fewer.digest()}) == 3
    assert fewer.explain("model.layers.0.self_attn.q_b_proj").weight_word == "source"
    assert config.explain("model.layers.0.self_attn.q_b_proj").weight_word == "fp8_e4m3/per_channel"
    assert [entry.path for entry in fewer.exclude_layers[-3:]] == [f"with_excludes[{index}]" for index in range(3)]
    assert remapped.names.packed_modules_mapping == NameRules(packed_modules_mapping=PACKED).packed_modules_mapping
    assert remapped.source is not None
    assert remapped.source.names == remapped.names
    assert config.remapped() == config


def test_remapping_keeps_what_is_not_given() -> None:
    config = QuantizationConfig.from_dict(BLOCK_FP8, names=NameRules(num_experts=3, tensors=["a.weight"]))
    once = config.remapped(packed_modules_mapping=PACKED).remapped({"lm_head": "model.lm_head"})
    assert once.names.num_experts == 3
    assert once.names.tensors == {"a.weight"}
    assert dict(once.names.packed_modules_mapping).keys() == PACKED.keys()
    assert not once.resolve("model.lm_head").is_quantized


def test_an_empty_exclude_matches_nothing(config: QuantizationConfig) -> None:
    fewer = config.with_excludes("")
    assert fewer.resolve("a") == config.resolve("a")
    assert fewer.unmatched(["a"]) == config.unmatched(["a"])


def test_a_bad_exclude_is_refused(config: QuantizationConfig) -> None:
    with pytest.raises(ConfigError, match=r"with_excludes\[1\].*does not compile"):
        config.with_excludes("a", "re:(")


def test_it_is_frozen(config: QuantizationConfig) -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.quant_method = "fp8"  # type: ignore[misc]
    with pytest.raises((attrs.exceptions.FrozenInstanceError, AttributeError)):
        config.extra = 1  # type: ignore[attr-defined]


# -- asking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "empty module name"),
        (".a", "begins with a dot"),
        (".", "begins with a dot"),
        ("a\nb", "line break"),
        ("a.b\n", "line break"),
        ("a\n.b", "line break"),
        ("x" * 4097, "longer than 4096"),
        ("a." * 3000, "longer than 4096"),
    ],
)
def test_names_that_no_module_has(config: QuantizationConfig, name: str, fault: str) -> None:
    for ask in (config.resolve, config.resolve_afresh, config.explain, lambda each: config.resolve_many(["a", each])):
        for _ in range(2):
            with pytest.raises(ResolveError, match=fault) as caught:
                ask(name)
            assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", ["a.", "a..b", "a b", "é.ü", "0", "x" * 4096, "a." * 2048, "A.[*]"])
def test_odd_names_have_answers(config: QuantizationConfig, name: str) -> None:
    assert config.resolve(name) == config.explain(name).config == plain_resolve(config, name)
    assert config.resolve(name).weight == PTPC


def test_one_look_up_of_a_known_name_is_the_same_object(config: QuantizationConfig) -> None:
    first = config.resolve("model.layers.0.self_attn.o_proj")
    assert config.resolve("model.layers.0.self_attn.o_proj") is first
    assert config.resolve("model.layers.7.self_attn.o_proj") is first


def test_explain_says_why_and_which_entry(config: QuantizationConfig) -> None:
    expert = config.explain("model.layers.1.mlp.experts.0.up_proj")
    assert expert.why is Why.PATTERN
    assert expert.entry is not None
    assert expert.entry.path == "$.layer_quant_config['*expert*']"
    assert expert.changes
    assert str(expert) == (
        "model.layers.1.mlp.experts.0.up_proj: mxfp4 x mxfp4:dynamic,"
        " pattern '*expert*' ($.layer_quant_config['*expert*'])"
    )
    gate = config.explain("model.layers.1.mlp.gate")
    assert (gate.why, gate.keeps_source, gate.changes) == (Why.EXCLUDE, True, False)
    assert gate.weight_word == "source"
    head = config.explain("lm_head")
    assert head.weight_word == head.activation_word == "none"
    other = config.explain("model.layers.0.mlp.up_proj")
    assert (other.why, other.entry) == (Why.GLOBAL, None)


def test_the_kind_of_a_module_counts_where_it_is_known(config: QuantizationConfig) -> None:
    norm = config.explain("model.norm", ModuleInfo(kind="norm"))
    assert norm.why is Why.UNSUPPORTED
    assert norm.reason == "norm modules are not quantized"
    obstacle = config.explain("model.x", ModuleInfo(obstacle="it is tied"))
    assert obstacle.reason == "it is tied"
    plain = config.explain("model.layers.0.mlp.up_proj", ModuleInfo(stored_dtype="BF16"))
    assert not plain.source.is_quantized


def test_the_slot_of_experts_by_kind() -> None:
    config = QuantizationConfig.from_online({"linear": "fp8_per_channel", "moe": "mxfp4"})
    assert str(config.resolve("a.mlp.experts").weight) == "mxfp4"
    assert str(config.resolve("a.moe").weight) == "fp8_e4m3/per_channel"
    assert config.explain("a.moe", ModuleInfo(kind="moe")).weight_word == "mxfp4"


def test_unmatched_entries() -> None:
    request = {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head", "nothing", "*.q_proj", ""]}
    config = QuantizationConfig.from_online(request, names=NameRules(packed_modules_mapping=PACKED))
    assert [entry.text for entry in config.unmatched(["model.layers.0.self_attn.qkv_proj", "a.lm_head"])] == ["nothing"]


def test_disagreeing_shards_name_both_rules() -> None:
    request = {
        "global_quant_config": "mxfp4",
        "layer_quant_config": {"a.q_proj": "mxfp8"},
        "exclude_layer": ["a.v_proj"],
    }
    config = QuantizationConfig.from_online(request, names=NameRules(packed_modules_mapping=PACKED))
    with pytest.raises(ResolveError) as caught:
        config.resolve("a.qkv_proj")
    for part in (
        "a.qkv_proj",
        "shards",
        "a.q_proj",
        "$.layer_quant_config",
        "a.k_proj",
        "global",
        "$.exclude_layer[0]",
    ):
        assert part in str(caught.value)


def test_many_disagreeing_experts_are_counted() -> None:
    request = {"global_quant_config": "mxfp4", "exclude_layer": ["m.experts.0"]}
    config = QuantizationConfig.from_online(request, names=NameRules(num_experts=8))
    with pytest.raises(ResolveError, match=r"m\.experts: its experts .* and 17 more ->"):
        config.resolve("m.experts")


def test_leaves_come_from_tensors_then_counts_then_literals() -> None:
    request = {"layer_quant_config": {"m.experts.0.w1": "mxfp4", "m.experts.1.w1": "mxfp4"}}
    by_literal = QuantizationConfig.from_online(request)
    assert by_literal.matcher.members("m.experts") == ("m.experts.0.w1", "m.experts.1.w1")
    assert by_literal.explain("m.experts").members == ("m.experts.0.w1", "m.experts.1.w1")
    counted = by_literal.with_names(NameRules(num_experts=2, expert_leaves=("w1",)))
    assert counted.matcher.members("m.experts") == ("m.experts.0.w1", "m.experts.1.w1")
    stored = by_literal.with_names(NameRules(num_experts=2, tensors=["m.experts.0.w1.weight", "experts.0.w3.weight"]))
    assert stored.matcher.members("m.experts") == ("m.experts.0.w1",)
    assert stored.matcher.members("experts") == ("experts.0.w3",)
    renamed = by_literal.with_names(
        NameRules(name_mapping={"old.": "m."}, tensors=["old.experts.5.w1.weight", "experts."])
    )
    assert renamed.matcher.members("m.experts") == ("m.experts.5.w1",)
    odd = by_literal.with_names(NameRules(tensors=["m.experts..weight", "m.experts.weight"]))
    assert odd.matcher.members("m.experts") == by_literal.matcher.members("m.experts")
    assert stored.matcher.members("n.experts") == (
        "n.experts.0.gate_proj",
        "n.experts.0.up_proj",
        "n.experts.0.down_proj",
        "n.experts.1.gate_proj",
        "n.experts.1.up_proj",
        "n.experts.1.down_proj",
    )
    assert QuantizationConfig().matcher.members("m.experts") == ()


def test_renamed_literals_take_the_short_way_and_renamed_globs_the_full_one() -> None:
    rules = NameRules(name_mapping={"old.": "model."})
    document = {"quant_method": "fp8", "modules_to_not_convert": ["old.layers.0", "lm_head"]}
    literal = QuantizationConfig.from_dict(document, names=rules)
    assert literal.matcher.resolver.is_plain
    for entry in ("old.*.q", "re:old.*q", "re:(?=old).*q"):
        other = QuantizationConfig.from_dict({**document, "modules_to_not_convert": [entry]}, names=rules)
        assert not other.matcher.resolver.is_plain
        assert not other.resolve("model.layers.0.q").is_quantized
        assert other.resolve("model.layers.0.k").is_quantized
        assert other.resolve_many(["model.layers.0.q"]) == {"model.layers.0.q": other.resolve("model.layers.0.q")}
    assert not literal.resolve("model.layers.0.q").is_quantized
    assert literal.resolve("model.layers.1.q").is_quantized


def test_shards_without_a_tensor_have_no_vote() -> None:
    rules = NameRules(packed_modules_mapping=PACKED, tensors=["a.q_proj.weight", "a.q_proj.weight_scale"])
    request = {"layer_quant_config": {"*.q_proj": "mxfp4"}}
    config = QuantizationConfig.from_online(request, names=rules)
    assert str(config.resolve("a.qkv_proj").weight) == "mxfp4"
    with pytest.raises(ResolveError):
        config.resolve("b.qkv_proj")


def test_the_global_decision() -> None:
    assert QuantizationConfig.from_dict(BLOCK_FP8).global_decision().weight_word == "fp8_e4m3/block_128x128"
    source = QuantizationConfig.from_dict(BLOCK_FP8)
    assert (
        QuantizationConfig.from_online(REQUEST, source=source).global_decision().weight_word == "fp8_e4m3/per_channel"
    )
    experts = QuantizationConfig.from_online({"layer_quant_config": {"*experts*": "mxfp4"}}, source=source)
    assert experts.global_decision().weight_word == "source"


# -- remembering ------------------------------------------------------------------------------------------------------


def test_memory_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch, config: QuantizationConfig) -> None:
    for module, limit in (
        (answers_module, "MAX_REMEMBERED"),
        (answers_module, "MAX_ROWS"),
        (answers_module, "MAX_IN_ROW"),
    ):
        monkeypatch.setattr(module, limit, 16)
    monkeypatch.setattr(resolver_module, "MAX_PATHS", 16)
    names = [f"p{index}.q{index % 7}.r{index}.{leaf}" for index in range(60) for leaf in ("gate", "expert", "x")]
    names += [f"model.leaf{index}" for index in range(50)]
    names += [f"model.{layer}.gate.expert.gate{layer}" for layer in range(40)]
    config = config.with_excludes(
        *(f"lit{index}.below" for index in range(40)), *(f"*x{index}y*" for index in range(40))
    )
    names += [f"lit{index}.below.x{index}y.a" for index in range(40)]
    expected = {name: plain_resolve(config, name) for name in names}
    for _ in range(2):
        assert {name: config.resolve(name) for name in names} == expected
        assert config.resolve_many(names) == expected
    assert [config.explain(name).config for name in names] == [*expected.values()]
    assert len(config.matcher.resolver._paths) <= 16
    assert len(config._answers) <= 16
    assert len(config._answers._rows) <= 16
    assert all(len(row) <= 16 for row in config._answers._rows.values())
    assert len(config._answers._rows._shared) <= 16
    assert len(config.matcher.resolver._states) <= 16


def test_long_paths_and_segments_are_not_kept(config: QuantizationConfig) -> None:
    long = "s" * 600
    for name in (f"{long}.a.b", f"a.{long}", f"{long}.gate.{long}"):
        assert config.resolve(name) == plain_resolve(config, name)
    assert all(len(key) <= 512 for key in (*config._answers, *config._answers._rows))
    assert all(len(leaf) <= 512 for row in config._answers._rows.values() for leaf in row)


# -- copying ----------------------------------------------------------------------------------------------------------


def test_copies_are_equal_and_answer(config: QuantizationConfig) -> None:
    names = (*DEEPSEEK.checkpoint_names(), *DEEPSEEK.serving_names())
    answers = config.resolve_many(names)
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301  (made here)
        assert other == config
        assert hash(other) == hash(config)
        assert other.digest() == config.digest()
        assert other.resolve_many(names) == answers
        assert other.to_dict() == config.to_dict()
        assert repr(other) == repr(config)


def test_every_pickle_protocol(config: QuantizationConfig) -> None:
    config.resolve("a")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(config, protocol)) == config  # noqa: S301  (made here)


def test_compiled_entries_do_not_travel(config: QuantizationConfig) -> None:
    before = len(pickle.dumps(config))
    config.resolve_many(DEEPSEEK.checkpoint_names(20, 20))
    assert len(pickle.dumps(config)) < before * 1.1


def test_threads_resolve_while_configs_come_and_go() -> None:
    names = DEEPSEEK.checkpoint_names(4, 4)
    source = QuantizationConfig.from_dict(BLOCK_FP8, names=DEEPSEEK.rules())
    shared = QuantizationConfig.from_online(REQUEST, source=source)
    expected = {name: plain_resolve(shared, name) for name in names}
    barrier = threading.Barrier(32)

    def work(seed: int) -> bool:
        barrier.wait()
        for round_ in range(6):
            own = QuantizationConfig.from_online(REQUEST, source=source)
            turned = names[seed % len(names) :] + names[: seed % len(names)]
            config = shared if round_ % 2 else own
            found = config.resolve_many(turned) if seed % 3 else {name: config.resolve(name) for name in turned}
            if found != expected or own.digest() != shared.digest():
                return False
        return True

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))


# -- printing ---------------------------------------------------------------------------------------------------------


def test_repr_shows_the_entries(config: QuantizationConfig) -> None:
    text = repr(config)
    for part in ("QuantizationConfig(quant_method='online'", "*expert*", "lm_head", "source="):
        assert part in text
    assert "_document" not in text


def test_html_escapes_everything() -> None:
    request = {
        "global_quant_config": "mxfp4",
        "layer_quant_config": {"<script>*": "mxfp8"},
        "exclude_layer": ["<b>&\"'"],
    }
    source = QuantizationConfig.from_dict(BLOCK_FP8)
    html = QuantizationConfig.from_online(request, source=source)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;*" in html
    assert '<b>&"' not in html
    html.encode()
    for part in ("everything else", "kept as it is", "mxfp8", "checkpoint", "fp8_e4m3/block_128x128"):
        assert part in html


def test_html_of_long_lists_is_cut() -> None:
    request = {"global_quant_config": "mxfp4", "exclude_layer": [f"m{index}" for index in range(1000)]}
    html = QuantizationConfig.from_online(request)._repr_html_()
    assert "and 800 more" in html
    assert len(html) < 40_000
    assert "unquantized" in QuantizationConfig()._repr_html_()


def test_dumps_are_json(config: QuantizationConfig) -> None:
    assert json.loads(json.dumps(config.to_dict())) == {"request": REQUEST, "shorthand": None}
    assert config.source is not None
    assert config.source.to_dict() == BLOCK_FP8


def test_equal_documents_are_equal_configs() -> None:
    one, two = (QuantizationConfig.from_online(REQUEST) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != one.with_excludes("x")
    assert one.resolve("a") == LayerQuantConfig(PTPC, get_format("ptpc_fp8").activation, "online")


def test_leaves_of_a_container_are_those_that_either_config_names() -> None:
    """The checkpoint's literals name the experts, which the globs of the request then tell apart."""
    source = QuantizationConfig.from_dict(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": [
                "model.layers.0.mlp.experts.0.up_proj",
                "model.layers.0.mlp.experts.0.down_proj",
            ],
        }
    )
    request = QuantizationConfig.from_online({"layer_quant_config": {"*.up_proj": "mxfp4"}}, source=source)
    with pytest.raises(ResolveError, match=r"its experts must have one format"):
        request.resolve("model.layers.0.mlp.experts")
