"""Hostile documents and names: a clear error or the right answer, in bounded work and memory."""

from __future__ import annotations

import sys
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from quant_spec import ConfigError, NameRules, Pattern, QuantizationConfig, ResolveError
from quant_spec.automaton import Automaton
from quant_spec.regexes import parse_regex
from quant_spec.resolver import Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

CATASTROPHIC = [
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(.*)*x",
    "(a*)*b",
    "(x+x+)+y",
    "(.*a){20}$",
    "((a*)*)*$",
    "([a-z]+)*_",
]


def request(**lists: object) -> dict[str, object]:
    return {"global_quant_config": "mxfp4", **lists}


class Steps:
    """Counts the moves of the automaton: work, whatever the clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        moved = Automaton._moved

        def counted(automaton: Automaton, state: object, character: str) -> frozenset[int]:
            self.count += 1
            return moved(automaton, state, character)  # type: ignore[arg-type]

        monkeypatch.setattr(Automaton, "_moved", counted)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@pytest.mark.parametrize("expression", CATASTROPHIC)
def test_catastrophic_expressions_take_a_step_a_character(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    name = "a" * 4000 + "!"
    config = QuantizationConfig.from_online(request(exclude_layer=[f"re:{expression}"]))
    config.resolve(name)
    assert 0 < steps.count <= 2 * len(name) + 50


@pytest.mark.parametrize("expression", [r"(?=(a+)+$)", r"\b(a|aa)+$", "(?i)(a*)*b", r"(a+)\1+b.*.*", "(?=.*.*.*x)"])
def test_catastrophic_expressions_that_need_backtracking_are_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"^\$\.exclude_layer\[0\]: .*could take too long"):
        QuantizationConfig.from_online(request(exclude_layer=[f"re:{expression}"]))


def test_backtracking_is_tried_on_names_of_bounded_length() -> None:
    config = QuantizationConfig.from_online(request(exclude_layer=["re:(?=.*b).*c$"]))
    assert seconds(lambda: config.resolve("a" * 2000)) < 5
    with pytest.raises(ResolveError, match="longer than 2000 characters") as caught:
        config.resolve("a" * 2001)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("glob", ["*a" * 60 + "b", "*" * 5000, "?" * 3000 + "*", "[a-z]*" * 100 + "!"])
def test_globs_cannot_backtrack(glob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    config = QuantizationConfig.from_online(request(exclude_layer=[glob]))
    config.resolve("a" * 4000)
    assert steps.count <= 2 * 4000 + 50


def test_counted_repeats_are_bounded() -> None:
    for expression in ("(a{1000}){1000}", "a{100000}", "((a{50}){50}){50}"):
        with pytest.raises(ConfigError, match="too large"):
            parse_regex(expression)
    assert parse_regex("a{1000}").linear


@pytest.mark.parametrize("name", ["a" * 100_000, "a." * 50_000 + "b", "." * 100_000, "[" * 100_000])
def test_names_of_a_hundred_thousand_characters_are_an_error(name: str) -> None:
    config = QuantizationConfig.from_online(request(exclude_layer=["re:.*x", "*y*", "z"]))
    with pytest.raises(ResolveError, match="longer than 4096") as caught:
        config.resolve(name)
    assert len(str(caught.value)) < 300


def test_entries_of_a_hundred_thousand_characters() -> None:
    long = "a.b" * 33_000
    config = QuantizationConfig.from_online(request(exclude_layer=[long, f"*{long}", f"{long[:4000]}*"]))
    assert config.resolve("c").is_quantized
    assert not config.resolve(long[:4001]).is_quantized
    with pytest.raises(ConfigError, match="of 99000 characters") as caught:
        QuantizationConfig.from_online(request(exclude_layer=[f"re:{long}"]))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("template", ["model.layers.{0}.mlp", "word{0}", "*m{0}*x"])
def test_work_and_memory_are_linear_in_the_number_of_entries(template: str) -> None:
    def peak(count: int) -> tuple[float, int]:
        lists = [template.format(number) for number in range(count)]
        tracemalloc.start()
        started = time.perf_counter()
        config = QuantizationConfig.from_online(request(exclude_layer=lists))
        assert config.resolve(f"model.layers.{count - 1}.mlp.up").is_quantized == ("layers" not in template)
        assert not config.resolve(template.format(count - 1).replace("*", "")).is_quantized
        found = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(2_000), peak(40_000)
    assert large[1] < 30 * small[1]
    assert large[1] < 40_000 * 3_000
    assert large[0] < 60 * max(small[0], 0.05)


@pytest.mark.slow
def test_a_million_entries() -> None:
    lists = [f"model.layers.{number}.mlp" for number in range(1_000_000)]
    started = time.perf_counter()
    config = QuantizationConfig.from_online(request(exclude_layer=lists))
    assert not config.resolve("model.layers.999999.mlp.up_proj").is_quantized
    assert config.resolve("model.layers.1000000.mlp.up_proj").is_quantized
    assert time.perf_counter() - started < 120


def test_many_expressions_share_what_they_begin_with() -> None:
    automaton = Automaton()
    for number in range(2000):
        automaton.add_regex(parse_regex(rf"model\.layers\.{number}\.mlp"), number)
    assert len(automaton) < 2000 * 8


def test_a_path_of_two_thousand_segments_costs_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    config = QuantizationConfig.from_online(request(exclude_layer=["*.q.*", "re:.*z$", "a.a.a"]))
    config.resolve(".".join("b" * 2000))
    assert steps.count < 5000


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize("depth", [50, 10_000])
def test_a_deep_list_is_a_wrong_type(depth: int) -> None:
    deep: object = "mxfp4"
    for _ in range(depth):
        deep = [deep]
    fault = r"^\$\.exclude_layer" if depth == 50 else r"^\$: nested too deeply"
    with pytest.raises(ConfigError, match=fault) as caught:
        QuantizationConfig.from_online(request(exclude_layer=deep))
    assert len(str(caught.value)) < 1000


def test_a_deep_extra_key_of_a_checkpoint() -> None:
    shallow = {"quant_method": "fp8", "extra": nested(50)}
    assert QuantizationConfig.from_dict(shallow).to_dict() == shallow
    with pytest.raises(ConfigError, match=r"^\$: nested too deeply"):
        QuantizationConfig.from_dict({"quant_method": "fp8", "extra": nested(10_000)})


@pytest.mark.parametrize("depth", [50, 10_000])
def test_a_deep_document_of_no_known_method(depth: int) -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig.from_dict({"quant_method": nested(depth)})
    assert caught.value.path == "$.quant_method"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -(10**400), 0.5])
def test_numbers_that_are_no_sizes(value: float) -> None:
    for document in (
        {"quant_method": "fp8", "weight_block_size": [value, 128]},
        {"quant_method": "gptq", "bits": value, "group_size": 128},
    ):
        with pytest.raises(ConfigError):
            QuantizationConfig.from_dict(document)
    with pytest.raises(ConfigError):
        QuantizationConfig.from_online({"global_quant_config": value})


def test_lone_surrogates_are_named_in_a_message_that_can_be_printed() -> None:
    for document in (
        request(exclude_layer=["\ud800"]),
        {"global_quant_config": "\udfff"},
        {"layer_quant_config": {"a\ud800": "mxfp4"}},
        {"\ud800": 1},
    ):
        with pytest.raises(ConfigError) as caught:
            QuantizationConfig.from_online(document)
        str(caught.value).encode()


def test_a_surrogate_in_a_name_is_an_answer_or_an_error() -> None:
    config = QuantizationConfig.from_online(request(exclude_layer=["*gate*"]))
    assert config.resolve("a.\ud800").is_quantized
    assert not config.resolve("\udc00gate").is_quantized


def test_a_checkpoint_that_holds_what_json_cannot() -> None:
    with pytest.raises(ConfigError):
        QuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": {128}})  # type: ignore[dict-item]


def test_every_defect_of_a_large_wrong_document_is_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig.from_online(request(exclude_layer=[1] * 20_000))
    assert 1 < len(caught.value.defects) <= 1001
    assert "more defects" in str(caught.value)
    assert len(str(caught.value)) < 300_000


def test_free_form_names_do_not_grow_the_states_without_bound() -> None:
    entries = [Pattern.parse(text, "$") for text in ("*.gate.*", "re:.*(up|down)_proj$", "model.layers.0")]
    resolver = Resolver(entries, NameRules(), mapped=False)
    for number in range(20_000):
        resolver.hits(f"s{number}.t{number * 7}.gate")
    assert len(resolver._states) < 5_000


def test_recursion_limit_is_left_alone() -> None:
    before = sys.getrecursionlimit()
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_regex("(" * 4000 + "a" + ")" * 4000)
    assert sys.getrecursionlimit() == before
