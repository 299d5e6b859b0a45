"""Whole models over several ranks: in memory and streamed, tensor and expert parallel, well and not."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import TYPE_CHECKING

import jsonschema
import pytest
import torch
from small_models import PACKED, Engine, checkpoint, filled
from thread_ranks import ThreadRanks, results, run_ranks
from torch import nn

from quant_kernels import QuantizedTensor, dequantize
from quant_kernels.checks import NonFiniteError
from quant_kernels.loading.model import quantize_model
from quant_kernels.loading.streaming import OnlineQuantizer
from quant_spec import LoadError, NameRules, PlanError, QuantizationConfig, get_format

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quant_spec.report import QuantReport

STYLES = {"*qkv_proj": "column", "*o_proj": "row", "*experts": "tensor"}
INNER, SIZES, HIDDEN, EXPERTS = 1024, (1024, 1024, 1024), 256, 2
WAYS = {
    "one": ([1024], [(1024, 1024, 1024)]),
    "two": ([512, 512], [(512, 512, 512)] * 2),
    "three, unequal": ([512, 384, 128], [(384, 256, 512), (512, 640, 256), (128, 128, 256)]),
    "four": ([256] * 4, [(256, 256, 256)] * 4),
    "eight": ([128] * 8, [(128, 128, 128)] * 8),
    "four, within blocks": (
        [64, 320, 192, 448],
        [(64, 192, 256), (320, 320, 256), (192, 256, 256), (448, 256, 256)],
    ),
}
TARGETS = ("ptpc_fp8", "mxfp4", "mxfp8", "nvfp4", "per_block_fp8")


def config(target: str = "ptpc_fp8", source: dict[str, object] | None = None) -> QuantizationConfig:
    names = NameRules(packed_modules_mapping=PACKED)
    below = QuantizationConfig.from_dict(source, names=names) if source else None
    request = {"global_quant_config": target, "exclude_layer": ["lm_head", "*.gate.*"]}
    return QuantizationConfig.from_online(request, source=below, names=names)


def whole_engine() -> Engine:
    model = filled(Engine(1, EXPERTS, HIDDEN, INNER, SIZES))
    assert isinstance(model, Engine)
    return model


def starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def cut_fused(tensor: torch.Tensor, way: list[tuple[int, ...]], rank: int) -> torch.Tensor:
    """Return a rank's rows of each projection of a fused weight [.., sum of rows, K]."""
    wholes = [sum(each) for each in zip(*way, strict=True)]
    parts = []
    for shard, block in enumerate(tensor.split(wholes, dim=-2)):
        first = sum(sizes[shard] for sizes in way[:rank])
        parts.append(block[..., first : first + way[rank][shard], :])
    return torch.cat(parts, dim=-2)


def rank_engine(whole: Engine, inner: list[int], sizes: list[tuple[int, ...]], rank: int) -> Engine:
    """Return a rank's model: what an engine's loader makes of the whole weights."""
    model = Engine(1, EXPERTS, HIDDEN, inner[rank], sizes[rank])
    state = whole.state_dict()
    for name, parameter in model.named_parameters():
        parameter.data = piece(name, state[name], inner, sizes, rank).contiguous()
    return model


def piece(
    name: str, tensor: torch.Tensor, inner: list[int], sizes: list[tuple[int, ...]], rank: int, per_byte: int = 1
) -> torch.Tensor:
    """Return a rank's piece of a weight, or of its codes."""
    if name.endswith("qkv_proj.weight"):
        return cut_fused(tensor, sizes, rank)
    if name.endswith("w13_weight"):
        return cut_fused(tensor, [(each, each) for each in inner], rank)
    if name.endswith("o_proj.weight"):
        bounds = starts([each[0] for each in sizes])
    elif name.endswith("w2_weight"):
        bounds = starts(inner)
    else:
        return tensor
    return tensor[..., bounds[rank] // per_byte : bounds[rank + 1] // per_byte]


def held(model: Engine, name: str) -> QuantizedTensor:
    """Return a weight that a quantized model holds."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    data = getattr(module, attribute).detach()
    second = getattr(module, f"{attribute}_scale_2", None)
    per_byte = 2 if data.dtype is torch.float4_e2m1fn_x2 else 1
    shape = (*data.shape[:-1], data.shape[-1] * per_byte)
    return QuantizedTensor(data, getattr(module, f"{attribute}_scale"), module.quant_config.weight, shape, second)


WEIGHTS = (
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.0.mlp.experts.w2_weight",
)


def assert_pieces(models: list[Engine], whole: Engine, inner: list[int], sizes: list[tuple[int, ...]]) -> None:
    """Compare codes and values of every rank with the pieces of the whole's."""
    for name in WEIGHTS:
        expected = held(whole, name)
        per_byte = expected.shape[-1] // expected.data.shape[-1]
        for rank, model in enumerate(models):
            owner = model.get_submodule(name.rpartition(".")[0])
            if owner.__dict__.get("quant_type") is None:
                assert expected.key == get_format("per_block_fp8").weight, name
                continue
            mine = held(model, name)
            codes = piece(name, expected.data.view(torch.uint8), inner, sizes, rank, per_byte)
            assert torch.equal(mine.data.view(torch.uint8), codes), (name, rank)
            offset = getattr(owner, f"{name.rpartition('.')[2]}_block_offset", (0, 0))
            values = piece(name, dequantize(expected), inner, sizes, rank)
            assert torch.equal(dequantize(mine, offset=offset), values), (name, rank)


@pytest.fixture(scope="module")
def original() -> Engine:
    return whole_engine()


@pytest.fixture(scope="module")
def whole() -> dict[str, Engine]:
    """The whole model in every format."""
    found = {}
    for target in TARGETS:
        model = whole_engine()
        quantize_model(model, config(target), write_report=False)
        found[target] = model
    return found


def quantize_ranks(
    original: Engine, way: str, target: str, **options: object
) -> list[tuple[Engine, QuantReport, ThreadRanks]]:
    inner, sizes = WAYS[way]

    def work(ranks: ThreadRanks) -> tuple[Engine, QuantReport, ThreadRanks]:
        model = rank_engine(original, inner, sizes, ranks.rank)
        report = quantize_model(model, config(target), group=ranks, parallel=STYLES, write_report=False, **options)
        return model, report, ranks

    return results(run_ranks(len(inner), work))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_models_of_all_ranks_are_pieces_of_the_whole(
    original: Engine, whole: dict[str, Engine], way: str, target: str
) -> None:
    answers = quantize_ranks(original, way, target)
    assert_pieces([model for model, _, _ in answers], whole[target], *WAYS[way])
    fused_off_grid = target == "per_block_fp8" and "within" in way
    assert answers[0][1].num_layers == (1 if fused_off_grid else 3)
    if fused_off_grid:
        kept = {layer.layer: layer.reason for layer in answers[0][1].kept}
        assert "cannot share blocks of 128 rows" in kept["model.layers.0.self_attn.qkv_proj"]


@pytest.mark.parametrize("way", ["two", "three, unequal"])
@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("stored", ["bf16", "block fp8"])
def test_streamed_pieces_equal_those_of_the_whole(original: Engine, way: str, target: str, stored: str) -> None:
    """Every rank is given the whole checkpoint in another order, and cuts it."""
    inner, sizes = WAYS[way]
    tensors, source = list(checkpoint(original)), None
    if stored == "block fp8":
        from test_streaming import BLOCK, block_checkpoint

        tensors, source = block_checkpoint(original), BLOCK

    def load(model: Engine, shift: int, **options: object) -> OnlineQuantizer:
        with OnlineQuantizer(model, config(target, source), write_report=False, **options) as quantizer:
            quantizer.load_all([*tensors[shift:], *tensors[:shift]])
        return quantizer

    def work(ranks: ThreadRanks) -> Engine:
        model = Engine(1, EXPERTS, HIDDEN, inner[ranks.rank], sizes[ranks.rank], "meta")
        load(model, 5 * ranks.rank, group=ranks, parallel=STYLES)
        return model

    expected = Engine(1, EXPERTS, HIDDEN, INNER, SIZES, "meta")
    load(expected, 0)
    assert_pieces(results(run_ranks(len(inner), work)), expected, inner, sizes)


def test_whole_fused_tensors_are_cut_by_projection(original: Engine) -> None:
    inner, sizes = WAYS["two"]
    tensors = [(name, tensor.clone()) for name, tensor in original.state_dict().items()]

    def work(ranks: ThreadRanks) -> Engine:
        model = Engine(1, EXPERTS, HIDDEN, inner[ranks.rank], sizes[ranks.rank], "meta")
        with OnlineQuantizer(model, config(), group=ranks, parallel=STYLES, write_report=False) as quantizer:
            quantizer.load_all(tensors)
        return model

    expected = whole_engine()
    quantize_model(expected, config(), write_report=False)
    assert_pieces(results(run_ranks(2, work)), expected, inner, sizes)


def test_one_collective_a_layer_and_only_where_needed(original: Engine) -> None:
    for _, _, said in quantize_ranks(original, "two", "ptpc_fp8"):
        assert said.reductions == [
            "model.layers.0.mlp.experts: agreeing on magnitudes",
            "model.layers.0.self_attn.o_proj: agreeing on magnitudes",
        ]
        assert said.sent_bytes == 4 * (1 + HIDDEN) + 4 * (1 + EXPERTS * HIDDEN)
    for _, _, said in quantize_ranks(original, "two", "mxfp4"):
        assert said.reductions == []


def turned_around(model: nn.Module) -> nn.Module:
    """Return the model with the children of every module in the opposite order."""
    for module in list(model.modules()):
        children = list(module._modules.items())
        module._modules.clear()
        module._modules.update(reversed(children))
    return model


BLOCKS = 11


def rows_of_many_blocks(ranks: ThreadRanks) -> nn.Module:
    """Return a model whose layers all take a collective; its modules come in another order on every other rank."""
    model = nn.ModuleDict({"lm_head": Row(64), "layers": nn.ModuleList(Row(64) for _ in range(BLOCKS))})
    return turned_around(model) if ranks.rank % 2 else model


def names_of_many_blocks() -> list[str]:
    holders = [*(f"layers.{block}" for block in range(BLOCKS)), "lm_head"]
    return [f"{holder}.down_proj" for holder in holders]


def test_collectives_come_in_the_order_of_names() -> None:
    def work(ranks: ThreadRanks) -> list[str]:
        model = filled(rows_of_many_blocks(ranks))
        report = quantize_model(model, {"global_quant_config": "ptpc_fp8"}, group=ranks, write_report=False)
        return [ranks.reductions, [layer.layer for layer in report.layers]]

    answers = results(run_ranks(3, work))
    for reductions, reported in answers:
        assert reductions == [f"{name}: agreeing on magnitudes" for name in names_of_many_blocks()]
        assert reported == answers[0][1]


def test_collectives_come_in_the_order_of_names_whatever_arrives_first() -> None:
    whole = torch.ones(64, 192, dtype=torch.bfloat16)

    def work(ranks: ThreadRanks) -> list[str]:
        model = rows_of_many_blocks(ranks).to("meta")
        shapes = {name: (64, 192) if "down" in name else (64, 64) for name, _ in model.named_parameters()}
        names = list(shapes)
        random.Random(ranks.rank).shuffle(names)  # noqa: S311  (an order, no secret)
        with OnlineQuantizer(model, {"global_quant_config": "ptpc_fp8"}, group=ranks, write_report=False) as quantizer:
            quantizer.load_all((name, whole[:, : shapes[name][1]]) for name in names)
        return ranks.reductions

    for reductions in results(run_ranks(3, work)):
        assert reductions == [f"{name}: agreeing on magnitudes" for name in names_of_many_blocks()]


def test_report_is_merged_over_ranks(original: Engine, whole: dict[str, Engine], tmp_path: Path, root: Path) -> None:
    del whole
    inner, sizes = WAYS["two"]

    def work(ranks: ThreadRanks) -> QuantReport:
        model = rank_engine(original, inner, sizes, ranks.rank)
        return quantize_model(model, config(), group=ranks, parallel=STYLES, report_dir=tmp_path, measure=True)

    reports = results(run_ranks(2, work))
    assert len(list(tmp_path.iterdir())) == 1
    assert reports[0].saved_to == reports[1].saved_to
    document = json.loads(reports[0].saved_to.read_text())
    jsonschema.validate(document, json.loads((root / "schemas" / "report.schema.json").read_text()))
    single = quantize_model(whole_engine(), config(), write_report=False, measure=True)
    for merged, alone in zip(reports[0].layers, single.layers, strict=True):
        assert (merged.layer, merged.shapes, merged.weights) == (alone.layer, alone.shapes, alone.weights)
        assert merged.bytes_before == alone.bytes_before
        assert merged.sqnr_db == pytest.approx(alone.sqnr_db, rel=1e-9)
    assert document["loading"]["ranks"] == 2


# -- what cannot be done, and what goes wrong -------------------------------------------------------------------------


class Row(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.down_proj = nn.Linear(k, 64, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.down_proj.quant_parallel = "row"


@pytest.mark.parametrize(("target", "k"), [("mxfp4", 48), ("mxfp8", 1040), ("nvfp4", 24)])
def test_cut_inside_a_group_keeps_the_layer_with_the_numbers(target: str, k: int) -> None:
    def work(ranks: ThreadRanks) -> QuantReport:
        return quantize_model(Row(k), {"global_quant_config": target}, group=ranks, write_report=False)

    for report in results(run_ranks(2, work)):
        assert [layer.layer for layer in report.layers] == ["up_proj"]
        assert f"input side of {2 * k}, {k} on each of 2 ranks" in report.kept[0].reason
        assert any(f"{2 * k}" in warning for warning in report.warnings)


def test_cut_inside_a_group_is_an_error_if_asked_for() -> None:
    def work(ranks: ThreadRanks) -> QuantReport:
        request = {"global_quant_config": "mxfp4"}
        return quantize_model(Row(48), request, group=ranks, on_unsupported="error", write_report=False)

    for answer in run_ranks(2, work):
        assert isinstance(answer, (PlanError, LoadError))
        assert "down_proj: input side of 96, 48 on each of 2 ranks" in str(answer)


def failing_ranks(size: int, work: Callable[[ThreadRanks], object]) -> list[str]:
    """Run ranks that must all raise, each in a few seconds, and return the texts."""
    started = time.perf_counter()
    answers = run_ranks(size, work, timeout=5.0)
    assert time.perf_counter() - started < 20
    for answer in answers:
        assert isinstance(answer, (LoadError, PlanError, NonFiniteError, RuntimeError)), answer
    return [str(answer) for answer in answers]


def test_another_config_on_one_rank(original: Engine) -> None:
    def work(ranks: ThreadRanks) -> object:
        model = rank_engine(original, *WAYS["two"], ranks.rank)
        target = ("ptpc_fp8", "mxfp4")[ranks.rank]
        return quantize_model(model, config(target), group=ranks, parallel=STYLES, write_report=False)

    for text in failing_ranks(2, work):
        assert "has another config or other options" in text


def test_another_shape_on_one_rank(original: Engine) -> None:
    def work(ranks: ThreadRanks) -> object:
        model = rank_engine(original, *WAYS["two"], ranks.rank)
        if ranks.rank:
            model.model.layers[0].self_attn.o_proj.weight.data = torch.zeros(255, 256, dtype=torch.bfloat16)
        return quantize_model(model, config(), group=ranks, parallel=STYLES, write_report=False)

    for text in failing_ranks(2, work):
        assert "o_proj.weight: shape [" in text


def test_no_layer_says_how_it_is_cut(original: Engine) -> None:
    def work(ranks: ThreadRanks) -> object:
        model = rank_engine(original, *WAYS["two"], ranks.rank)
        return quantize_model(model, config(), group=ranks, write_report=False)

    for text in failing_ranks(2, work):
        assert "no layer says how it is cut over 2 ranks" in text


def test_unknown_style(original: Engine) -> None:
    def work(ranks: ThreadRanks) -> object:
        model = rank_engine(original, *WAYS["two"], ranks.rank)
        return quantize_model(model, config(), group=ranks, parallel={"*o_proj": "rows"}, write_report=False)

    for text in failing_ranks(2, work):
        assert "unknown style 'rows'; allowed: column, row, tensor, expert, replicated; did you mean 'row'?" in text


@pytest.mark.parametrize(("name", "target"), [(name, target) for name in WEIGHTS for target in ("ptpc_fp8", "mxfp4")])
def test_bad_value_on_one_rank_is_an_error_on_all(original: Engine, name: str, target: str) -> None:
    """Whether the ranks agree on the layer's magnitudes, on a later layer's, or on none."""

    def work(ranks: ThreadRanks) -> object:
        model = rank_engine(original, *WAYS["two"], ranks.rank)
        if ranks.rank == 1:
            model.get_parameter(name).data.view(-1)[77] = float("nan")
        return quantize_model(model, config(target), group=ranks, parallel=STYLES, write_report=False)

    for text in failing_ranks(2, work):
        assert name in text


def test_missing_tensor_on_one_rank_is_an_error_on_all(original: Engine) -> None:
    tensors = list(checkpoint(original))

    def work(ranks: ThreadRanks) -> object:
        inner, sizes = WAYS["two"]
        model = Engine(1, EXPERTS, HIDDEN, inner[ranks.rank], sizes[ranks.rank], "meta")
        with OnlineQuantizer(model, config(), group=ranks, parallel=STYLES, write_report=False) as quantizer:
            for name, tensor in tensors:
                if not (ranks.rank == 1 and name.endswith("o_proj.weight")):
                    quantizer.load(name, tensor)
        return quantizer.report

    for text in failing_ranks(2, work):
        assert "model.layers.0.self_attn.o_proj.weight" in text


def test_loader_that_raises_on_one_rank_is_an_error_on_all(original: Engine) -> None:
    tensors = list(checkpoint(original))

    def work(ranks: ThreadRanks) -> object:
        inner, sizes = WAYS["two"]
        model = Engine(1, EXPERTS, HIDDEN, inner[ranks.rank], sizes[ranks.rank], "meta")
        with OnlineQuantizer(model, config(), group=ranks, parallel=STYLES, write_report=False) as quantizer:
            for index, (name, tensor) in enumerate(tensors):
                if ranks.rank == 1 and index == 2:
                    raise RuntimeError("the disk is gone")
                quantizer.load(name, tensor)
        return quantizer.report

    for text in failing_ranks(2, work):
        assert "the disk is gone" in text


def test_waiting_layer_counts_towards_the_budget(original: Engine) -> None:
    """o_proj is complete, but every rank converts the experts first, and their tensors do not come."""
    tensors = [pair for pair in checkpoint(original) if "o_proj.weight" in pair[0]]
    tensors += [(name, tensor) for name, tensor in checkpoint(original) if "q_proj" in name]

    def work(ranks: ThreadRanks) -> object:
        inner, sizes = WAYS["two"]
        model = Engine(1, EXPERTS, HIDDEN, inner[ranks.rank], sizes[ranks.rank], "meta")
        options = {"group": ranks, "parallel": STYLES, "staging_bytes": 1000, "write_report": False}
        with OnlineQuantizer(model, config(), **options) as quantizer:
            quantizer.load_all(tensors)
        return quantizer.report

    for text in failing_ranks(2, work):
        assert "staging budget of 1,000 bytes exceeded" in text
        assert "model.layers.0.self_attn.o_proj (" in text


# -- expert parallel --------------------------------------------------------------------------------------------------

SPREAD = [(0, 1, 2), (3,), (4, 5, 6, 7)]


def expert_engine(ids: tuple[int, ...], device: str = "cpu") -> Engine:
    model = Engine(1, len(ids), HIDDEN, 128, SIZES, device)
    model.model.layers[0].mlp.gate = nn.Linear(HIDDEN, 8, bias=False, dtype=torch.bfloat16, device=device)
    model.model.layers[0].mlp.experts.expert_ids = ids
    return model


@pytest.fixture(scope="module")
def all_experts() -> Engine:
    model = filled(Engine(1, 8, HIDDEN, 128, SIZES))
    assert isinstance(model, Engine)
    return model


EXPERT_STYLES = {"*experts": "expert", "*_proj": "replicated"}


@pytest.mark.parametrize("streamed", ["per expert", "stacks", "in memory"])
def test_experts_spread_unevenly(all_experts: Engine, streamed: str) -> None:
    tensors = list(checkpoint(all_experts)) if streamed == "per expert" else list(all_experts.state_dict().items())

    def work(ranks: ThreadRanks) -> tuple[Engine, QuantReport]:
        ids = SPREAD[ranks.rank]
        if streamed == "in memory":
            model = expert_engine(ids)
            state = dict(all_experts.state_dict())
            for name, parameter in model.named_parameters():
                parameter.data = state[name][list(ids)] if "experts" in name else state[name].clone()
            return model, quantize_model(
                model, config("mxfp4"), group=ranks, parallel=EXPERT_STYLES, write_report=False
            )
        model = expert_engine(ids, "meta")
        options = {"group": ranks, "parallel": EXPERT_STYLES, "write_report": False}
        with OnlineQuantizer(model, config("mxfp4"), **options) as quantizer:
            quantizer.load_all(tensors)
        return model, quantizer.report

    answers = results(run_ranks(3, work))
    expected = filled(Engine(1, 8, HIDDEN, 128, SIZES))
    alone = quantize_model(expected, config("mxfp4"), write_report=False)
    for rank, (model, report) in enumerate(answers):
        for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            mine = getattr(model.model.layers[0].mlp.experts, name).view(torch.uint8)
            theirs = getattr(expected.model.layers[0].mlp.experts, name).view(torch.uint8)[list(SPREAD[rank])]
            assert torch.equal(mine, theirs), (name, rank)
        experts = report.layers[2]
        assert (experts.layer, experts.experts, experts.weights) == ("model.layers.0.mlp.experts", "0-7", 16)
        assert experts.shapes == ((8, 256, 256), (8, 256, 128))
        assert experts.bytes_before == alone.layers[2].bytes_before
        assert report.layers[0].bytes_before == alone.layers[0].bytes_before


def test_bad_expert_is_named_by_its_global_index(all_experts: Engine) -> None:
    def work(ranks: ThreadRanks) -> object:
        ids = SPREAD[ranks.rank]
        model = expert_engine(ids)
        for name, parameter in model.named_parameters():
            state = all_experts.state_dict()[name]
            parameter.data = state[list(ids)] if "experts" in name else state.clone()
        if 6 in ids:
            model.model.layers[0].mlp.experts.w2_weight.data[ids.index(6), 9, 1] = float("nan")
        return quantize_model(model, config("mxfp4"), group=ranks, parallel=EXPERT_STYLES, write_report=False)

    for text in failing_ranks(3, work):
        assert "model.layers.0.mlp.experts.w2_weight: expert 6" in text


def test_expert_on_two_ranks_is_an_error() -> None:
    def work(ranks: ThreadRanks) -> object:
        model = expert_engine(((0, 1), (1, 2))[ranks.rank])
        return quantize_model(model, config("mxfp4"), group=ranks, parallel=EXPERT_STYLES, write_report=False)

    for text in failing_ranks(2, work):
        assert "model.layers.0.mlp.experts: expert 1 is on rank 0 and on rank 1" in text


def test_experts_spread_and_the_rest_cut(original: Engine, whole: dict[str, Engine]) -> None:
    inner, sizes = WAYS["two"]

    def work(ranks: ThreadRanks) -> Engine:
        model = Engine(1, 1, HIDDEN, INNER, sizes[ranks.rank], "meta")
        model.model.layers[0].mlp.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16, device="meta")
        model.model.layers[0].mlp.experts.expert_ids = (ranks.rank,)
        styles = {**STYLES, "*experts": "expert"}
        with OnlineQuantizer(model, config(), group=ranks, parallel=styles, write_report=False) as quantizer:
            quantizer.load_all(checkpoint(original))
        return model

    models = results(run_ranks(2, work))
    for name in WEIGHTS[:2]:
        expected = held(whole["ptpc_fp8"], name)
        for rank, model in enumerate(models):
            codes = piece(name, expected.data.view(torch.uint8), inner, sizes, rank)
            assert torch.equal(held(model, name).data.view(torch.uint8), codes)
    for name in WEIGHTS[2:]:
        expected = held(whole["ptpc_fp8"], name)
        for rank, model in enumerate(models):
            assert torch.equal(held(model, name).data.view(torch.uint8)[0], expected.data.view(torch.uint8)[rank])
