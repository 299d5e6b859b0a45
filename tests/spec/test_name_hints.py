"""What an entry that fits nothing may have been meant for: right, and in bounded time."""

from __future__ import annotations

import time

import pytest

from quant_spec import QuantizationConfig, plan
from quant_spec.name_hints import MAX_SEARCHES, SHOWN, NameHints, did_you_mean

MIXTRAL = [
    "lm_head",
    "model.norm",
    *(
        f"model.layers.{n}.{leaf}"
        for n in range(32)
        for leaf in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "input_layernorm",
            "post_attention_layernorm",
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
        )
    ),
]
GATE = "model.layers.*.block_sparse_moe.gate"


@pytest.mark.parametrize(
    ("entry", "hints"),
    [
        ("lm_haed", ("lm_head",)),
        ("LM_HEAD", ("lm_head",)),
        ("*gates*", ("*gate*",)),
        ("*.self_atn.*", ("*.self_attn.*",)),
        ("re:.*self_atn.*", ("re:.*self_attn.*",)),
        ("modle.layers.3.self_attn.q_porj", ("model.layers.3.self_attn.q_proj",)),
        ("*.mlp.gate.*", (GATE,)),
        ("mlp.gate", (GATE,)),
        ("re:gate", (GATE,)),
        ("model.layers.99.self_attn.o_proj", ("model.layers.*.self_attn.o_proj",)),
        ("*.mlp.gats", (GATE,)),
        ("router", ()),
        ("gate_proj", ()),
        ("layers.mlp", ()),
        ("model.layers.*.nothing", ()),
        ("", ()),
        ("*", ()),
        ("\ud800", ()),
    ],
)
def test_hints(entry: str, hints: tuple[str, ...]) -> None:
    assert NameHints(MIXTRAL).of(entry) == hints


@pytest.mark.parametrize("entry", ["*.mlp.gate.*", "lm_haed", "*gates*", "*.self_atn.*", "re:.*self_atn.*"])
def test_a_hint_is_an_entry_that_fits(entry: str) -> None:
    for hint in NameHints(MIXTRAL).of(entry):
        config = QuantizationConfig.from_online({"global_quant_config": "mxfp4", "exclude_layer": [hint]})
        assert config.unmatched(MIXTRAL) == ()


def test_few_are_shown() -> None:
    names = [f"block{n}.gate" for n in range(5)]
    assert len(NameHints(names).of("mlp.gate")) == SHOWN
    assert did_you_mean(("a", "b")) == "; did you mean 'a' or 'b'?"
    assert NameHints(()).of("gate") == ()


def test_entries_beyond_the_limit_are_not_searched_for() -> None:
    hints = NameHints(["gate_proj"])
    for n in range(MAX_SEARCHES):
        hints.of(f"gate_prj{n}")
    assert hints.of("gate_prjx") == ()
    assert hints.of("GATE_PROJ") == ("gate_proj",)
    assert NameHints(["a" * 200]).of("a" * 199) == ()


def test_thousands_of_entries_over_tens_of_thousands_of_names() -> None:
    leaves = ("up_proj", "down_proj", "gate_proj")
    names = [f"model.layers.{i}.mlp.experts.{j}.{k}" for i in range(58) for j in range(64) for k in leaves]
    entries = [f"modle{n}.layers.{n}.mlp.shraed.down_porj" for n in range(2000)]
    config = QuantizationConfig.from_online({"global_quant_config": "mxfp4", "exclude_layer": entries})
    begun = time.process_time()
    found = plan(config, names)
    assert time.process_time() - begun < 10, "it took 30 s a hundred entries when each was compared with each name"
    assert len(found.unmatched) == 2000
    assert "did you mean" in found.warnings[0]
