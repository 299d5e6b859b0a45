"""Every public function with arguments of every wrong type: an answer, or one of the library's own errors."""

from __future__ import annotations

import inspect
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quant_spec
from quant_spec import (
    ArgumentError,
    ConfigError,
    LayerQuantConfig,
    ModelFacts,
    ModuleInfo,
    NameRules,
    Pattern,
    QuantizationConfig,
    QuantKey,
    QuantSpecError,
    get_format,
)
from quant_spec.backends import BACKENDS, Backend, BackendRegistry, select_backend
from quant_spec.documents import load_json, read_json
from quant_spec.dtypes import element_type
from quant_spec.formats.base import key_nbytes
from quant_spec.granularity import PerBlock, PerGroup, parse_granularity
from quant_spec.regexes import check_regex, parse_regex
from quant_spec.schema import schema_for, validate
from quant_spec.vllm_names import activation_key, vllm_name, weight_key

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = {"global_quant_config": "mxfp4", "exclude_layer": ["lm_head", "*.gate.*"]}
CONFIG = QuantizationConfig.from_online(REQUEST)
OVER = QuantizationConfig.from_online(REQUEST, source=QuantizationConfig.from_dict({"quant_method": "fp8"}))
FORMAT = get_format("mxfp4")


class Odd:
    """What no argument is."""


def _long() -> int:
    """Return an integer of more digits than Python writes; built anew, since hypothesis prints what it samples."""
    return 10**5000


ATOMS = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 8, 1.5, float("nan"), float("inf"), 1j, Decimal(1), b"a", b"\xff"]),
    st.sampled_from(["", "a", "abc", "8", "mxfp4", "fp8", "re:(", "*", "\ud800", "a\n", "lm_head", "moe", "9" * 5000]),
    st.sampled_from([Odd(), Odd, len, Path("nowhere"), range(3), ..., NotImplemented, CONFIG, FORMAT, ModuleInfo()]),
    st.integers() | st.text(max_size=3),
    st.builds(_long),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.text(max_size=3), st.builds(_long), st.just((1,)))
JUNK = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(KEYS, inner, max_size=2),
        st.lists(inner, max_size=2).map(iter),
        st.sets(st.integers(0, 3) | st.text(max_size=2), max_size=2),
    ),
    max_leaves=4,
)

CALLS: dict[str, Callable[..., object]] = {
    "from_dict": QuantizationConfig.from_dict,
    "from_dict(method=)": lambda junk, key: QuantizationConfig.from_dict({"quant_method": junk, "ignore": key}),
    "from_dict(fp8=)": lambda junk: QuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": junk}),
    "from_dict(gptq=)": lambda a, b: QuantizationConfig.from_dict({"quant_method": "gptq", "bits": a, "group_size": b}),
    "from_dict(facts=)": lambda junk: QuantizationConfig.from_dict({"quant_method": "fp8"}, facts=junk),
    "from_dict(names=)": lambda junk: QuantizationConfig.from_dict({"quant_method": "fp8"}, names=junk),
    "from_online": QuantizationConfig.from_online,
    "from_online(global=)": lambda junk: QuantizationConfig.from_online({"global_quant_config": junk}),
    "from_online(layers=)": lambda junk: QuantizationConfig.from_online({"layer_quant_config": junk}),
    "from_online(excludes=)": lambda junk: QuantizationConfig.from_online({"exclude_layer": junk}),
    "from_online(targets=)": lambda junk: QuantizationConfig.from_online({"targets": junk}),
    "from_online(target=)": lambda junk: QuantizationConfig.from_online({"targets": {"a": junk}}),
    "from_online(source=)": lambda junk: QuantizationConfig.from_online(REQUEST, source=junk),
    "from_online(shorthand=)": lambda junk: QuantizationConfig.from_online({}, shorthand=junk),
    "from_online(names=)": lambda junk: QuantizationConfig.from_online(REQUEST, names=junk),
    "remapped": CONFIG.remapped,
    "with_names": CONFIG.with_names,
    "with_excludes": CONFIG.with_excludes,
    "resolve": CONFIG.resolve,
    "resolve over a source": OVER.resolve,
    "resolve_afresh": lambda junk: CONFIG.with_excludes("re:(?!a)").resolve(junk),
    "resolve_many": CONFIG.resolve_many,
    "explain": CONFIG.explain,
    "explain(module=)": lambda junk: CONFIG.explain("a.b", junk),
    "explain(tp=)": lambda junk: CONFIG.explain("a.b", ModuleInfo(shape=(64, 64), parallel="row"), tp=junk),
    "unmatched": CONFIG.unmatched,
    "NameRules": NameRules,
    "NameRules(packed=)": lambda junk: NameRules(packed_modules_mapping=junk),
    "NameRules(shards=)": lambda junk: NameRules(packed_modules_mapping={"qkv_proj": junk}),
    "NameRules(num_experts=)": lambda junk: NameRules(num_experts=junk),
    "NameRules(expert_leaves=)": lambda junk: NameRules(expert_leaves=junk),
    "NameRules(tensors=)": lambda junk: NameRules(tensors=junk),
    "NameRules.with_modules": lambda junk: NameRules().with_modules(num_experts=junk),
    "ModelFacts": ModelFacts,
    "ModuleInfo": ModuleInfo,
    "ModuleInfo(shape=)": lambda junk: ModuleInfo(shape=junk).input_sizes(),
    "ModuleInfo(shard_shapes=)": lambda junk: ModuleInfo(shard_shapes=junk).input_sizes(),
    "ModuleInfo(parallel=)": lambda junk, other: ModuleInfo(parallel=junk, stored_dtype=other, obstacle=other),
    "Pattern.parse": Pattern.parse,
    "QuantKey.parse": QuantKey.parse,
    "QuantKey.same_format": get_format("mxfp4").weight.same_format,
    "PerGroup": lambda junk: str(PerGroup(junk)),
    "PerBlock": lambda one, other: str(PerBlock(one, other)),
    "parse_granularity": parse_granularity,
    "element_type": element_type,
    "plan": quant_spec.plan,
    "plan(modules=)": lambda junk: quant_spec.plan(CONFIG, junk, allow_unchanged=True),
    "plan(module=)": lambda junk: quant_spec.plan(CONFIG, {"a.b": junk}, allow_unchanged=True),
    "plan(tensors=)": lambda junk: quant_spec.plan(CONFIG, ["a.b"], tensors=junk),
    "plan(tp=)": lambda junk: quant_spec.plan(CONFIG, ["a.b"], tp=junk),
    "plan(runnable=)": lambda junk: quant_spec.plan(CONFIG, ["a.b"], runnable=junk),
    "get_format": get_format,
    "format_of_key": quant_spec.format_of_key,
    "register_format": quant_spec.register_format,
    "QuantFormat.check_k": FORMAT.check_k,
    "QuantFormat.data_shape": FORMAT.data_shape,
    "QuantFormat.scale_shape": FORMAT.scale_shape,
    "QuantFormat.nbytes": FORMAT.nbytes,
    "key_nbytes": key_nbytes,
    "get_parser": quant_spec.get_parser,
    "register_quant_parser": lambda junk, other: quant_spec.register_quant_parser(junk)(other),
    "scale_tensors": quant_spec.scale_tensors,
    "scale_tensors(tensors=)": lambda junk: quant_spec.scale_tensors(CONFIG, junk),
    "weight_scale_of": quant_spec.weight_scale_of,
    "shard_rows": lambda a, b, c: quant_spec.shard_rows(a, block_rows=b, tp=c),
    "shard_rows(rank=)": lambda a, b: quant_spec.shard_rows(ModuleInfo(shape=(4, 4)), block_rows=1, rank=a, shard=b),
    "load_json": load_json,
    "read_json": read_json,
    "validate": validate,
    "validate(document=)": lambda junk: validate(junk, "online"),
    "schema_for": schema_for,
    "weight_key": weight_key,
    "activation_key": activation_key,
    "vllm_name": vllm_name,
    "check_regex": check_regex,
    "parse_regex": parse_regex,
    "select_backend": lambda a, b, c: select_backend(a, kind=b, architecture=c),
    "select_backend(registry=)": lambda junk: select_backend(
        LayerQuantConfig(), kind="moe", architecture="any", registry=junk
    ),
    "Backend": Backend,
    "BackendRegistry.register": BackendRegistry().register,
}


@pytest.mark.parametrize("name", CALLS)
@hypothesis.settings(deadline=None, max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
@given(data=st.data())
def test_an_answer_or_one_of_our_errors(name: str, data: st.DataObject) -> None:
    call = CALLS[name]
    count = sum(
        each.default is inspect.Parameter.empty and each.kind is not inspect.Parameter.KEYWORD_ONLY
        for each in inspect.signature(call).parameters.values()
    )
    arguments = [data.draw(JUNK) for _ in range(count or 1)]
    error: QuantSpecError | None = None
    try:
        call(*arguments)
    except QuantSpecError as caught:
        error = caught
    if error is not None:
        assert len(str(error).encode()) < 20_000


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: CONFIG.resolve(None), "prefix: expected str, found None"),  # type: ignore[arg-type]
        (lambda: CONFIG.resolve(["a"]), r"prefix: expected str, found list \['a'\]"),  # type: ignore[arg-type]
        (lambda: CONFIG.resolve_many("abc"), "names: expected a collection of strings, found str 'abc'"),
        (lambda: CONFIG.resolve_many(["a", 1]), r"names\[1\]: expected str, found int 1"),  # type: ignore[list-item]
        (lambda: CONFIG.with_excludes(1), r"entries\[0\]: expected str, found int 1"),  # type: ignore[arg-type]
        (lambda: CONFIG.with_names({}), "names: expected NameRules, found dict"),  # type: ignore[arg-type]
        (lambda: CONFIG.explain("a", tp=0), "tp: expected an integer from 1 to 999999999, found int 0"),
        (lambda: CONFIG.explain("a", tp=True), "tp: expected an integer from 1"),
        (lambda: CONFIG.unmatched("lm_head"), "modules: expected a collection of strings"),
        (lambda: ModuleInfo(kind="lineer"), "kind: expected .* found str 'lineer'; did you mean 'linear'?"),  # type: ignore[arg-type]
        (lambda: ModuleInfo(shape=(4, -1)), r"shape\[1\]: expected an integer from 0"),
        (lambda: QuantizationConfig.from_online({}, shorthand=5), "shorthand: expected str or None, found int 5"),  # type: ignore[arg-type]
        (lambda: get_format(4), "word: expected str or QuantFormat, found int 4"),  # type: ignore[arg-type]
        (lambda: FORMAT.nbytes((4,)), r"shape: expected \[\.\., rows, columns\]"),
    ],
)
def test_an_argument_error_says_which_what_and_what_is_allowed(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{said}") as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"packed_modules_mapping": "abc"}, "packed_modules_mapping: expected object or list of pairs, found string"),
        ({"packed_modules_mapping": [1]}, r"packed_modules_mapping\[0\]: expected a pair, found number 1"),
        (
            {"packed_modules_mapping": {"a": None}},
            r"packed_modules_mapping\['a'\]: expected list of strings, found null",
        ),
        ({"packed_modules_mapping": {"a": "bc"}}, r"packed_modules_mapping\['a'\]: expected list of strings"),
        ({"packed_modules_mapping": {"a": ["b", 1]}}, r"packed_modules_mapping\['a'\]\[1\]: expected string"),
        ({"packed_modules_mapping": {1: ["b"]}}, "packed_modules_mapping: key 1 is no string"),
        ({"name_mapping": {"a": None}}, r"name_mapping\['a'\]: expected string, found null"),
        ({"num_experts": -1}, "num_experts: no number of experts: -1; allowed: 0 to 16384, null"),
        ({"num_experts": True}, "num_experts: no number of experts: true"),
        ({"num_experts": "8"}, "num_experts: no number of experts: '8'"),
        ({"num_experts": 10**6}, "num_experts: no number of experts: 1000000"),
        ({"expert_leaves": "up_proj"}, "expert_leaves: expected list of strings, found string 'up_proj'"),
        ({"tensors": "a.weight"}, "tensors: expected list of strings"),
        ({"tensors": ["a", 3]}, r"tensors\[1\]: expected string, found number 3"),
    ],
)
def test_name_rules_name_the_field(rules: dict[str, object], said: str) -> None:
    for make in (
        lambda: NameRules(**rules),  # type: ignore[arg-type]
        lambda: NameRules().with_modules(**rules),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            make()
    with pytest.raises(ArgumentError, match=r"unknown attribute 'num_expert'.*did you mean 'num_experts'"):
        NameRules().with_modules(num_expert=4)


def test_registries_are_left_as_they_were() -> None:
    assert all(isinstance(each, Backend) for each in BACKENDS)
    assert all(isinstance(each.name, str) for each in quant_spec.formats())


def test_what_is_no_parser_is_not_registered() -> None:
    with pytest.raises(ArgumentError, match=r"^parser_class: expected a class with a method parse"):
        quant_spec.register_quant_parser("odd")(Odd)  # type: ignore[type-var]


def test_a_group_that_a_modelopt_format_has_not() -> None:
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 32}}
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(ConfigError, match="group_size"):
        QuantizationConfig.from_dict(document)
