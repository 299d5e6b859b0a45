"""How much work a whole model takes, counted: what the benchmark measures in seconds must not creep up unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quant_spec import QuantizationConfig
from quant_spec.automaton import Automaton
from quant_spec.config import QuantizationConfig as Config
from quant_spec.resolver import Resolver

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, EXPERTS = 40, 64
NAMES = [
    *(
        f"model.layers.{layer}.self_attn.{leaf}"
        for layer in range(LAYERS)
        for leaf in ("q_a_proj", "q_b_proj", "o_proj")
    ),
    *(
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ),
]


class Calls:
    """Counts calls of methods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        for owner, name in (
            (Automaton, "_moved"),
            (Resolver, "_edge"),
            (Resolver, "below"),
            (Resolver, "hits"),
            (Config, "resolve_afresh"),
        ):
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        self.counts[name] = 0

        def call(*arguments: object) -> object:
            self.counts[name] += 1
            return method(*arguments)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def request(*excludes: str) -> dict[str, object]:
    return {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}, "exclude_layer": excludes}


def test_three_lines(calls: Calls) -> None:
    config = QuantizationConfig.from_online(request("lm_head", "*.gate.*"))
    for name in NAMES:
        config.resolve(name)
    parents = len({name.rpartition(".")[0] for name in NAMES})
    assert calls.counts["below"] <= parents + 3 * LAYERS + 3
    assert calls.counts["_edge"] < 500
    assert calls.counts["_moved"] < 3_000
    assert calls.counts["hits"] == calls.counts["resolve_afresh"] == 0
    before = dict(calls.counts)
    for name in NAMES:
        config.resolve(name)
    config.resolve_many(NAMES)
    assert calls.counts == before


def test_names_that_entries_spell_in_full_take_no_longer(calls: Calls) -> None:
    config = QuantizationConfig.from_online(request(*NAMES[::3]))
    found = config.resolve_many(NAMES)
    assert sum(not each.is_quantized for each in found.values()) == len(NAMES[::3])
    assert calls.counts["hits"] == calls.counts["resolve_afresh"] == 0


@pytest.mark.parametrize(
    ("form", "limit"), [("*.layers.{0}.*side{1}*", 60_000), (r"re:.*layers\.{0}\..*side{1}$", 60_000)]
)
def test_a_thousand_patterns(calls: Calls, form: str, limit: int) -> None:
    excludes = [form.format(number % LAYERS, number) for number in range(1_000)]
    config = QuantizationConfig.from_online(request(*excludes))
    assert all(each.is_quantized for each in config.resolve_many(NAMES).values())
    assert calls.counts["_moved"] < limit
    assert calls.counts["hits"] == 0


def test_a_request_over_a_checkpoint_walks_both_once(calls: Calls) -> None:
    source = QuantizationConfig.from_dict({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "*.o_proj"]})
    config = QuantizationConfig.from_online(request("*.gate.*"), source=source)
    config.resolve_many(NAMES)
    parents = len({name.rpartition(".")[0] for name in NAMES})
    assert calls.counts["below"] <= 2 * (parents + 3 * LAYERS + 3)
    assert calls.counts["resolve_afresh"] == 0
