"""The plan of a request over a model; stored tensors; rows of shards; how a request meets a checkpoint's format."""

from __future__ import annotations

import pickle

import attrs
import pytest

from quant_spec import (
    LoadError,
    ModelPlan,
    ModuleInfo,
    NameRules,
    PlanError,
    QuantizationConfig,
    QuantKey,
    ResolveError,
    RowRange,
    Why,
    plan,
    scale_tensors,
    shard_rows,
    weight_scale_of,
)
from quant_spec.decision import is_convertible
from quant_spec.quant_key import MXFP4, MXFP8, NVFP4

SHAPE = (256, 512)
MODULES: dict[str, ModuleInfo | None] = {
    "model.embed_tokens": ModuleInfo(kind="embedding", shape=(1000, 512)),
    "model.layers.0.self_attn.q_proj": ModuleInfo(shape=SHAPE),
    "model.layers.0.mlp.gate": ModuleInfo(shape=(8, 512)),
    "model.layers.0.mlp.experts": ModuleInfo(shape=(8, 256, 512)),
    "model.layers.0.mlp.down_proj": ModuleInfo(shape=(512, 272), parallel="row"),
    "model.norm": ModuleInfo(kind="norm", shape=(512,)),
    "lm_head": None,
}


def planned(request: dict[str, object], **options: object) -> ModelPlan:
    source = options.pop("source", None)
    config = QuantizationConfig.from_online(request, source=QuantizationConfig.from_dict(source))  # type: ignore[arg-type]
    return plan(config, options.pop("modules", MODULES), **options)  # type: ignore[arg-type]


def test_a_plan_in_full() -> None:
    request = {
        "global_quant_config": "mxfp4",
        "layer_quant_config": {"*.nothing": "mxfp8", "*.q_proj": "ptpc_fp8", "*.self_attn.*": "mxfp8"},
        "exclude_layer": ["lm_head", "lm_haed"],
    }
    found = planned(request)
    assert [module.name for module in found.modules] == [*MODULES]
    assert {module.name for module in found.changed} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.experts",
    }
    assert {module.name: module.decision.reason for module in found.kept} == {
        "model.embed_tokens": "embedding modules are not quantized",
        "model.norm": "norm modules are not quantized",
        "model.layers.0.mlp.down_proj": "input side of 272, is not a multiple of 32 as mxfp4 needs",
    }
    assert [entry.text for entry in found.unmatched] == ["lm_haed", "*.nothing"]
    assert [entry.text for entry in found.shadowed] == ["*.self_attn.*"]
    assert found.match_counts == {"lm_head": 1, "lm_haed": 0, "*.nothing": 0, "*.q_proj": 1, "*.self_attn.*": 1}
    warnings = "\n".join(found.warnings)
    for part in (
        "'lm_haed' matches no module; did you mean 'lm_head'?",
        "model.layers.0.mlp.gate: about to be quantized to mxfp4 by the global format: a router",
        "model.layers.0.mlp.down_proj: kept as unquantized: input side of 272",
    ):
        assert part in warnings
    assert "embed_tokens" not in warnings
    assert found["lm_head"].decision.why is Why.EXCLUDE
    with pytest.raises(KeyError):
        found["lm_haed"]


def test_bytes_before_and_after() -> None:
    found = planned({"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"]})
    assert found["model.layers.0.self_attn.q_proj"].nbytes("bfloat16") == (256 * 512 * 2, 256 * 512 // 2 + 256 * 16)
    assert found["model.layers.0.mlp.experts"].nbytes("float32") == (8 * 256 * 512 * 4, 8 * (256 * 512 // 2 + 256 * 16))
    assert found["model.embed_tokens"].nbytes("bfloat16") == (1000 * 512 * 2,) * 2
    assert found["model.norm"].nbytes("bfloat16") is None
    assert found["lm_head"].nbytes("bfloat16") is None
    fused = ModuleInfo(shard_shapes=((64, 128), (32, 128)))
    one = planned({"global_quant_config": "ptpc_fp8"}, modules={"a.qkv": fused})
    assert one["a.qkv"].nbytes("unheard_of") == (96 * 128 * 2, 96 * 128 + 96 * 4)


def test_names_alone_can_be_planned() -> None:
    found = planned({"global_quant_config": "mxfp4"}, modules=["a", "b"])
    assert len(found.changed) == 2
    assert found.warnings == ()


def test_risky_modules_by_an_entry_are_named_with_it() -> None:
    request = {"layer_quant_config": {"*": "mxfp4"}}
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(8)]
    warnings = planned(request, modules=[*names, "lm_head"]).warnings
    assert warnings[0].startswith("model.layers.0.mlp.gate, model.layers.1.mlp.gate")
    assert "and 3 more: about to be quantized to mxfp4 by '*' ($.layer_quant_config['*'])" in warnings[0]
    assert "lm_head: about to be quantized" in warnings[1]


def test_a_request_that_changes_nothing_is_an_error_that_says_why() -> None:
    request = {"layer_quant_config": {"*.nowhere": "mxfp4"}}
    with pytest.raises(PlanError) as caught:
        planned(request)
    assert f"changes none of the {len(MODULES)} modules" in str(caught.value)
    assert "'*.nowhere' ($.layer_quant_config['*.nowhere']) matches no module" in str(caught.value)
    assert planned(request, allow_unchanged=True).changed == ()
    assert plan(QuantizationConfig.from_dict(None), MODULES).changed == ()


def test_formats_that_the_engine_cannot_run() -> None:
    source = {"quant_method": "mxfp4", "modules_to_not_convert": ["q_proj"]}
    request = {"layer_quant_config": {"*.q_proj": "mxfp8"}, "exclude_layer": ["*.experts"]}
    modules = {"a.mlp.experts": ModuleInfo(shape=(2, 64, 64)), "a.q_proj": ModuleInfo(shape=(64, 64))}
    with pytest.raises(PlanError) as caught:
        planned(request, source=source, modules=modules, runnable=["mxfp8"])
    for part in ("a.mlp.experts: kept as mxfp4 (exclude '*.experts' ($.exclude_layer[0]))", "it can run mxfp8"):
        assert part in str(caught.value)
    assert len(planned(request, source=source, modules=modules, runnable=["mxfp8", "mxfp4"]).changed) == 1
    with pytest.raises(PlanError, match=r"kept as mxfp4 \(global\)"):
        planned({"layer_quant_config": {"*.q_proj": "mxfp8"}}, source=source, modules=modules, runnable=["mxfp8"])


def test_modules_without_a_tensor() -> None:
    rules = NameRules(
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj"]}, name_mapping={"transformer.": "model."}
    )
    config = QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, names=rules)
    tensors = ["transformer.a.q_proj.weight", "model.experts.0.up_proj.weight"]
    found = plan(config, ["model.a.qkv_proj", "model.experts", "model.b"], tensors=tensors)
    assert found.no_tensors == ("model.b",)
    assert plan(config, ["model.b"]).no_tensors == ()


def test_ranks_cut_the_input_side() -> None:
    modules = {"a": ModuleInfo(shape=(64, 96), parallel="row"), "b": ModuleInfo(shape=(64, 96), parallel="column")}
    found = planned({"global_quant_config": "mxfp4"}, modules=modules, tp=2)
    assert (
        found["a"].decision.reason == "input side of 96, 48 on each of 2 ranks, is not a multiple of 32 as mxfp4 needs"
    )
    assert found["b"].decision.changes


def test_plans_travel_and_show_themselves() -> None:
    found = planned({"global_quant_config": "mxfp4", "exclude_layer": ["lm_head", "<b>"]})
    again = pickle.loads(pickle.dumps(found))  # noqa: S301  (made here)
    assert again == found
    html = found._repr_html_()
    for part in (
        "3 of 7 modules change, 3 that were asked for cannot",
        "none → mxfp4",
        "exclude lm_head ($.exclude_layer[0])",
        "&lt;b&gt;",
    ):
        assert part in html
    assert "<b>&" not in html
    many = planned({"global_quant_config": "mxfp4"}, modules=[f"m{index}" for index in range(500)])
    assert "and 300 more" in many._repr_html_()


# -- how a request meets a checkpoint's format ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "convertible"),
    [
        ("fp8_e4m3/per_tensor", True),
        ("fp8_e4m3/per_channel", True),
        ("fp8_e4m3/block_128x128", True),
        ("fp8_e4m3/group_128", True),
        ("mxfp8", True),
        ("mxfp4", False),
        ("nvfp4", False),
        ("int8/per_channel", False),
        ("fp8_e5m2/per_tensor", False),
        ("fp8_e4m3/per_token", False),
        ("int4/group_128", False),
    ],
)
def test_sources_that_can_be_converted(word: str, convertible: bool) -> None:  # noqa: FBT001
    assert is_convertible(QuantKey.parse(word)) is convertible
    assert is_convertible(None)


def test_a_layer_in_the_target_format_is_left_bit_for_bit() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "mxfp8"})
    config = QuantizationConfig.from_online({"global_quant_config": "mxfp8"}, source=source)
    decision = config.explain("a")
    assert decision.why is Why.ALREADY
    assert not decision.changes
    assert decision.config.weight == source.resolve("a").weight
    assert decision.config.activation == MXFP8.as_activation(dynamic=True)


def test_a_source_that_is_not_converted_is_kept_with_the_reason() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "mxfp4"})
    config = QuantizationConfig.from_online({"layer_quant_config": {"*.experts": "ptpc_fp8"}}, source=source)
    decision = config.explain("a.mlp.experts")
    assert decision.why is Why.UNSUPPORTED
    assert decision.reason == "a mxfp4 source is not converted to fp8_e4m3/per_channel"
    assert (decision.weight_word, decision.config) == ("source", source.resolve("a.mlp.experts"))
    assert decision.reason in str(decision)


@pytest.mark.parametrize(
    ("info", "name", "kind", "class_name"),
    [
        (ModuleInfo(), "a.experts", "moe", "Linear"),
        (ModuleInfo(), "a", "linear", "Linear"),
        (ModuleInfo(kind="norm"), "a", "norm", "RMSNorm"),
        (ModuleInfo(kind="conv"), "a", "conv", "Conv1d"),
        (ModuleInfo(kind="embedding", class_name="X"), "a", "embedding", "X"),
    ],
)
def test_kind_and_class_by_name(info: ModuleInfo, name: str, kind: str, class_name: str) -> None:
    assert (info.kind_of(name), info.class_of(name)) == (kind, class_name)


def test_input_sizes() -> None:
    assert ModuleInfo().input_sizes() == ()
    assert ModuleInfo(shape=(2, 8, 16)).input_sizes() == (16,)
    assert ModuleInfo(shape=(8, 16), shard_shapes=((4, 16), (4, 16), (4, 32))).input_sizes() == (16, 32)


# -- stored tensors ---------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def test_scales_among_stored_tensors() -> None:
    config = QuantizationConfig.from_dict(FP8)
    tensors: dict[str, str | None] = {
        "a.weight": "F8_E4M3",
        "a.weight_scale": "F32",
        "a.input_scale": "F32",
        "b.weight": None,
        "b.weight_scale_inv": "F32",
        "b.act_scale": "F32",
        "norm.weight": "BF16",
        "lm_head.weight": "F8_E4M3",
        "a.bias": "BF16",
    }
    assert scale_tensors(config, tensors) == {"a": "a.weight_scale", "b": "b.weight_scale_inv"}
    request = QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, source=config)
    assert scale_tensors(request, tensors) == scale_tensors(config, tensors)


def test_all_missing_scales_in_one_error() -> None:
    config = QuantizationConfig.from_dict(FP8)
    with pytest.raises(LoadError) as caught:
        scale_tensors(config, {"a.weight": "F8_E4M3", "b.weight": "F8_E4M3", "b.weight_scale": "F32"})
    for part in ("a.weight_scale: missing", "a.input_scale: missing", "b.input_scale: missing", "per_tensor:static"):
        assert part in str(caught.value)
    assert "b.weight_scale: missing" not in str(caught.value)


def test_one_scale_a_module() -> None:
    assert weight_scale_of("a", iter(["a.weight_scale_inv", "b.weight_scale"])) == "a.weight_scale_inv"
    assert weight_scale_of("a", {"b.weight_scale": None}) is None
    with pytest.raises(LoadError, match=r"a: more than one weight scale: a\.weight_scale, a\.weight_scale_inv"):
        weight_scale_of("a", ["a.weight_scale", "a.weight_scale_inv"])


def test_methods_whose_tensors_have_other_names_are_not_looked_at() -> None:
    config = QuantizationConfig.from_dict({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False})
    assert scale_tensors(config, {"a.qweight": "I32", "a.scales": "F16", "b.weight": "I32"}) == {}


# -- rows of shards ---------------------------------------------------------------------------------------------------

FUSED = ModuleInfo(shard_shapes=((192, 64), (64, 64), (96, 64)), parallel="column")


@pytest.mark.parametrize(
    ("module", "options", "rows", "scale_rows"),
    [
        (ModuleInfo(shape=(256, 64)), {}, (0, 255), (0, 1)),
        (ModuleInfo(shape=(256, 64), parallel="column"), {"tp": 4, "rank": 1}, (64, 127), (0, 0)),
        (ModuleInfo(shape=(256, 64), parallel="row"), {"tp": 4, "rank": 3}, (0, 255), (0, 1)),
        (FUSED, {"tp": 2, "rank": 1, "shard": 0}, (96, 191), (0, 1)),
        (FUSED, {"tp": 2, "rank": 1, "shard": 1}, (32, 63), (2, 2)),
        (FUSED, {"tp": 2, "rank": 0, "shard": 2}, (0, 47), (3, 3)),
        (ModuleInfo(shape=(8, 256, 64), parallel="column"), {"tp": 2, "rank": 1}, (128, 255), (1, 1)),
    ],
)
def test_rows(module: ModuleInfo, options: dict[str, int], rows: tuple[int, int], scale_rows: tuple[int, int]) -> None:
    assert shard_rows(module, block_rows=128, **options) == RowRange(rows, scale_rows)


@pytest.mark.parametrize("shard", range(3))
def test_ranks_cover_all_rows_once(shard: int) -> None:
    found = [shard_rows(FUSED, block_rows=32, tp=2, rank=rank, shard=shard) for rank in range(2)]
    listed = [row for each in found for row in range(each.rows[0], each.rows[1] + 1)]
    assert listed == list(range(FUSED.shard_shapes[shard][0]))


@pytest.mark.parametrize(
    ("module", "options", "fault"),
    [
        (ModuleInfo(), {}, "no shard 0 of 0"),
        (FUSED, {"shard": 3}, "no shard 3 of 3"),
        (FUSED, {"tp": 2, "rank": 2}, "rank 2 of 2"),
        (FUSED, {"rank": -1}, "rank -1 of 1"),
        (FUSED, {"tp": 5}, "192 rows cannot be cut evenly over 5 ranks"),
    ],
)
def test_rows_that_cannot_be(module: ModuleInfo, options: dict[str, int], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        shard_rows(module, block_rows=128, **options)


# -- a digest ---------------------------------------------------------------------------------------------------------


def test_the_digest_is_the_same_everywhere() -> None:
    """A change of this text is a change of what compile caches hold: raise `SCHEMA_VERSION` with it."""
    config = QuantizationConfig.from_online({"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head"]})
    assert config.digest() == DIGEST
    assert len(QuantizationConfig().digest()) == 64


DIGEST = "5c660fd66392e682e56a76127eaff82cf2ed01d326dfcf5b66152f7617bf434b"


def test_everything_that_decides_is_in_the_digest() -> None:
    base = QuantizationConfig.from_dict(FP8)
    changed = [
        attrs.evolve(base, kv_cache=MXFP8),
        attrs.evolve(base, source_dtype="float16"),
        attrs.evolve(base, quant_method="other"),
        attrs.evolve(base, class_specs=((base.exclude_layers[0], base.global_spec),)),
        attrs.evolve(base, exclude_layers=()),
        attrs.evolve(base, global_spec=attrs.evolve(base.global_spec, weight=NVFP4)),
        attrs.evolve(base, global_spec=attrs.evolve(base.global_spec, weight=MXFP4)),
        base.remapped({"a": "b"}),
        base.remapped(packed_modules_mapping={"f": ["x", "y"]}),
        base.remapped(packed_modules_mapping={"f": ["y", "x"]}),
        base.with_names(NameRules(num_experts=2)),
        base.with_names(NameRules(expert_leaves=("w1",))),
        base.with_names(NameRules(tensors=["a.weight"])),
        QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, source=base),
        QuantizationConfig.from_online({"global_quant_config": "mxfp4"}),
    ]
    digests = {config.digest() for config in (base, *changed)}
    assert len(digests) == len(changed) + 1


def test_what_decides_nothing_is_not_in_the_digest() -> None:
    base = QuantizationConfig.from_dict({**FP8, "ignored_layers": ["a", "b"]})
    assert QuantizationConfig.from_dict({**FP8, "ignored_layers": ["b", "a", "b"], "note": 1}).digest() == base.digest()
    packed = {"f": ["x"], "g": ["y"]}
    turned = dict(reversed(packed.items()))
    assert (
        base.remapped(packed_modules_mapping=packed).digest() == base.remapped(packed_modules_mapping=turned).digest()
    )


def test_an_activation_alone_that_differs_is_an_error_of_the_plan_too() -> None:
    source = QuantizationConfig.from_dict(FP8)
    config = QuantizationConfig.from_online({"targets": {"*": {"activation": "mxfp8"}}}, source=source)
    with pytest.raises(ResolveError, match="asked for alone"):
        plan(config, ["a.b"])
    with pytest.raises(ResolveError, match=r"^a\.b: "):
        config.resolve("a.b")
    with pytest.raises(ResolveError, match=r"^a\.b: "):
        config.resolve_many(["a.b"])
