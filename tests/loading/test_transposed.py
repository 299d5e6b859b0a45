"""Experts stored [expert, input, output], as gpt-oss and Llama-4 have them, become what they would be turned first."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from small_models import assert_same, filled, state
from thread_ranks import ThreadRanks, results, run_ranks
from torch import nn

from quant_kernels import OnlineQuantizer, QuantizedTensor, dequantize, plan_model, quantize, quantize_model
from quant_kernels.checks import NonFiniteError
from quant_kernels.loading.modules import find_layers
from quant_spec import QuantizationConfig
from quant_spec.matching import Why

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERTS, HIDDEN, INNER = 3, 128, 384
TARGETS = ("ptpc_fp8", "mxfp4", "mxfp8", "nvfp4", "per_block_fp8")
FAMILIES = ("gpt-oss", "llama-4")
NAMES = ("gate_up_proj", "down_proj")


class Experts(nn.Module):
    """gpt-oss: gate and up in turn, biases, and an attribute that says how it lies; Llama-4: nothing but shapes."""

    def __init__(self, family: str, inner: int = INNER, experts: int = EXPERTS, device: str = "cpu") -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))

        self.gate_up_proj = new(experts, HIDDEN, 2 * inner)
        self.down_proj = new(experts, inner, HIDDEN)
        if family == "gpt-oss":
            self.is_transposed, self.is_concatenated = True, False
            self.gate_up_proj_bias, self.down_proj_bias = new(experts, 2 * inner), new(experts, HIDDEN)


class Mlp(nn.Module):
    def __init__(self, family: str, **sides: object) -> None:
        super().__init__()
        self.experts = Experts(family, **sides)


def model_of(family: str, **sides: object) -> nn.Module:
    return nn.ModuleDict({"mlp": Mlp(family, **sides)})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def original(family: str) -> nn.Module:
    return filled(model_of(family))


def request_for(target: str) -> QuantizationConfig:
    return QuantizationConfig.from_online({"global_quant_config": target})


def copy_of(original: nn.Module, family: str) -> nn.Module:
    model = model_of(family)
    model.load_state_dict(original.state_dict())
    return model


def expected(original: nn.Module, target: str) -> dict[str, QuantizedTensor]:
    """Quantize each stack after it was turned to [expert, output, input]."""
    tensors = original.state_dict()
    return {name: quantize(tensors[f"mlp.experts.{name}"].mT.contiguous(), target) for name in NAMES}


def held(model: nn.Module, name: str) -> tuple[torch.Tensor, ...]:
    """Return codes and scales of a stack, as bytes."""
    owner = model["mlp"].experts
    found = [getattr(owner, f"{name}{suffix}", None) for suffix in ("", "_scale", "_scale_2")]
    return tuple(raw(each) for each in found if each is not None)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def parts(result: QuantizedTensor) -> list[torch.Tensor]:
    return [each for each in (result.data, result.scale, result.second_scale) if each is not None]


@pytest.mark.parametrize("target", TARGETS)
def test_in_memory(original: nn.Module, family: str, target: str) -> None:
    model = copy_of(original, family)
    report = quantize_model(model, request_for(target), write_report=False)
    assert report.layers[0].shapes == ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    for name, result in expected(original, target).items():
        mine = held(model, name)
        assert len(mine) == len(parts(result))
        for left, right in zip(mine, parts(result), strict=True):
            assert torch.equal(left, raw(right)), name
    assert model["mlp"].experts.is_transposed is False
    for name, bias in original.state_dict().items():
        if name.endswith("_bias"):
            assert torch.equal(model.state_dict()[name], bias)


def test_a_second_pass_leaves_the_bytes_alone(original: nn.Module, family: str) -> None:
    """What was turned once is not turned again, and is known by the shape that it has now."""
    model = copy_of(original, family)
    quantize_model(model, request_for("ptpc_fp8"), write_report=False)
    before = state(model)
    stored = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}
    source = QuantizationConfig.from_dict({"quant_method": "quark", "global_quant_config": {"weight": stored}})
    again = QuantizationConfig.from_online({"global_quant_config": "mxfp8"}, source=source)
    report = quantize_model(model, again, write_report=False)
    assert report.layers[0].source == "fp8_e4m3/per_channel"
    assert model["mlp"].experts.gate_up_proj.shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert model["mlp"].experts.down_proj_scale.shape == (EXPERTS, HIDDEN, INNER // 32)
    assert before.keys() == state(model).keys()


def test_kept_stacks_stay_as_they_lie(original: nn.Module, family: str) -> None:
    request = {"global_quant_config": "ptpc_fp8", "exclude_layer": ["mlp.experts"]}
    holder = nn.ModuleDict({"mlp": Mlp(family, device="meta")})
    holder["other"] = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device="meta")
    with OnlineQuantizer(holder, request, write_report=False) as quantizer:
        quantizer.load_all(original.state_dict().items())
        quantizer.load("other.weight", torch.ones(64, 64, dtype=torch.bfloat16))
    for name, tensor in original.state_dict().items():
        assert torch.equal(holder.state_dict()[name], tensor), name
        assert holder.state_dict()[name].is_contiguous()
    assert getattr(holder["mlp"].experts, "is_transposed", True)


def test_no_temporary_copy_is_made_on_the_host(original: nn.Module, family: str) -> None:
    """Kernels read stacks as they lie."""
    model = copy_of(original, family)
    pointer = model["mlp"].experts.gate_up_proj.data_ptr()
    plan = find_layers(model, request_for("mxfp4").names)
    slot = plan["mlp.experts"].slots[0]
    assert slot.matrix.data_ptr() == pointer
    assert slot.shape == (EXPERTS, 2 * INNER, HIDDEN)


# -- streamed ---------------------------------------------------------------------------------------------------------


def one_by_one(model: nn.Module, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one matrix [output, input] an expert's projection, as a checkpoint of Linears holds them."""
    experts = model["mlp"].experts
    for index in range(EXPERTS):
        turned = experts.gate_up_proj[index].detach().mT
        halves = (turned[::2], turned[1::2]) if family == "gpt-oss" else turned.chunk(2)
        for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            yield f"mlp.experts.{index}.{name}.weight", half.contiguous()
        yield f"mlp.experts.{index}.down_proj.weight", experts.down_proj[index].detach().mT.contiguous()
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name.endswith("_bias"))


@pytest.mark.parametrize("way", ["stacks", "one by one", "deferred"])
@pytest.mark.parametrize("target", TARGETS)
def test_streamed(original: nn.Module, family: str, target: str, way: str) -> None:
    alike = copy_of(original, family)
    quantize_model(alike, request_for(target), write_report=False)
    tensors = list(original.state_dict().items()) if way != "one by one" else list(one_by_one(original, family))
    random.Random(0).shuffle(tensors)  # noqa: S311  (an order, no secret)
    model = model_of(family, device="meta")
    defer = ["*experts"] if way == "deferred" else []
    with OnlineQuantizer(model, request_for(target), write_report=False, defer=defer) as quantizer:
        quantizer.load_all(tensors)
    assert_same(model, alike)


def test_bad_value_is_named_by_expert_and_row(original: nn.Module, family: str) -> None:
    model = copy_of(original, family)
    with torch.no_grad():
        model["mlp"].experts.down_proj[1, 5, 7] = torch.inf
    before = state(model)
    with pytest.raises(NonFiniteError, match=r"down_proj: expert 1: 1 .*first bad rows: 7"):
        quantize_model(model, request_for("ptpc_fp8"), write_report=False)
    after = state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- several ranks ----------------------------------------------------------------------------------------------------

CUTS = {"one": [384], "two": [256, 128], "three": [128, 128, 128], "two, within blocks": [224, 160]}


def rank_tensors(original: nn.Module, family: str, inner: list[int], rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's piece of every tensor: gate and up of the same inner rows, down of the same inner columns."""
    first = sum(inner[:rank])
    own = slice(first, first + inner[rank])
    found = {}
    for name, tensor in original.state_dict().items():
        leaf = name.rpartition(".")[2]
        if leaf.startswith("gate_up"):
            if family == "gpt-oss":
                found[name] = tensor[..., 2 * own.start : 2 * own.stop].contiguous()
            else:
                found[name] = torch.cat([half[..., own] for half in tensor.chunk(2, -1)], -1)
        elif leaf == "down_proj":
            found[name] = tensor[:, own].contiguous()
        else:
            found[name] = tensor
    return found


def pieces(result: QuantizedTensor, name: str, family: str, inner: list[int], rank: int) -> torch.Tensor:
    """Return a rank's piece of the codes of a whole stack."""
    first = sum(inner[:rank])
    own = slice(first, first + inner[rank])
    codes = result.data.view(torch.uint8)
    per_byte = result.shape[-1] // codes.shape[-1]
    if name == "down_proj":
        return codes[..., own.start // per_byte : own.stop // per_byte]
    if family == "gpt-oss":
        return codes[:, 2 * own.start : 2 * own.stop]
    return torch.cat([half[:, own] for half in codes.chunk(2, 1)], 1)


@pytest.mark.parametrize("way", CUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_ranks_hold_pieces_of_the_whole(original: nn.Module, family: str, target: str, way: str) -> None:
    inner = CUTS[way]
    styles = {"*experts": "tensor"}

    def in_memory(ranks: ThreadRanks) -> nn.Module:
        model = model_of(family, inner=inner[ranks.rank])
        model.load_state_dict(rank_tensors(original, family, inner, ranks.rank))
        quantize_model(model, request_for(target), group=ranks, parallel=styles, write_report=False)
        return model

    def streamed(ranks: ThreadRanks) -> nn.Module:
        model = model_of(family, inner=inner[ranks.rank], device="meta")
        options = {"group": ranks, "parallel": styles, "write_report": False}
        with OnlineQuantizer(model, request_for(target), **options) as quantizer:
            quantizer.load_all(original.state_dict().items())
        return model

    if target == "per_block_fp8" and family == "llama-4" and "within" in way:
        for answer in run_ranks(len(inner), in_memory):
            assert "cannot share blocks of 128 rows" in str(answer)  # and nothing else could be converted
        return
    whole = expected(original, target)
    answers = results(run_ranks(len(inner), in_memory)), results(run_ranks(len(inner), streamed))
    for rank, (one, other) in enumerate(zip(*answers, strict=True)):
        assert_same(one, other)
        for name, result in whole.items():
            codes = held(one, name)[0]
            assert torch.equal(codes, pieces(result, name, family, inner, rank)), (name, rank)
        own = rank_tensors(original, family, inner, rank)
        for name, tensor in other.state_dict().items():
            if name.endswith("_bias"):
                assert torch.equal(tensor, own[name]), name


def test_experts_of_each_rank(original: nn.Module, family: str) -> None:
    spread = [(0, 2), (1,)]

    def work(ranks: ThreadRanks) -> nn.Module:
        model = model_of(family, experts=len(spread[ranks.rank]), device="meta")
        model["mlp"].experts.expert_ids = spread[ranks.rank]
        options = {"group": ranks, "parallel": {"*experts": "expert"}, "write_report": False}
        with OnlineQuantizer(model, request_for("mxfp4"), **options) as quantizer:
            quantizer.load_all(original.state_dict().items())
        return model

    whole = expected(original, "mxfp4")
    for rank, model in enumerate(results(run_ranks(2, work))):
        ids = list(spread[rank])
        for name, result in whole.items():
            assert torch.equal(held(model, name)[0], raw(result.data)[ids])
        for name, tensor in model.state_dict().items():
            if name.endswith("_bias"):
                assert torch.equal(tensor, original.state_dict()[name][ids]), name


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plan_gives_the_shapes_of_the_weights(family: str) -> None:
    plan = plan_model(model_of(family, device="meta"), request_for("mxfp4"))
    module = plan["mlp.experts"]
    assert module.decision.changes
    assert module.nbytes("bfloat16") == (EXPERTS * 3 * INNER * HIDDEN * 2, EXPERTS * 3 * INNER * HIDDEN * 17 // 32)


def test_input_side_that_does_not_fit_is_the_turned_one() -> None:
    """INNER + 8 is the input side of down_proj, though it lies as the middle one."""
    plan = plan_model(model_of("gpt-oss", inner=INNER + 8, device="meta"), {"global_quant_config": "ptpc_fp8"})
    assert plan["mlp.experts"].decision.changes
    model = nn.ModuleDict(
        {"mlp": Mlp("gpt-oss", inner=INNER + 8, device="meta"), "x": nn.Linear(32, 32, device="meta")}
    )
    kept = plan_model(model, {"global_quant_config": "mxfp4"})["mlp.experts"].decision
    assert kept.why is Why.UNSUPPORTED
    assert str(INNER + 8) in kept.reason


def test_quantized_stacks_that_lie_so_are_kept_with_the_reason() -> None:
    source = QuantizationConfig.from_dict({"quant_method": "fp8", "activation_scheme": "dynamic"})
    request = QuantizationConfig.from_online({"global_quant_config": "mxfp4"}, source=source)
    model = nn.ModuleDict({"mlp": Mlp("gpt-oss", device="meta"), "x": nn.Linear(32, 32, device="meta")})
    decision = plan_model(model, request)["mlp.experts"].decision
    assert decision.why is Why.UNSUPPORTED
    assert "quantized experts are stored as [expert, input, output]" in decision.reason


# -- codes in the way of gpt-oss --------------------------------------------------------------------------------------

MXFP4_SOURCE = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}


def blocks_and_scales(original: nn.Module) -> tuple[dict[str, QuantizedTensor], list[tuple[str, torch.Tensor]]]:
    """Return MXFP4 stacks, and the tensors of a checkpoint that spells them `X_blocks` [E, N, K/32, 16], `X_scales`."""
    stacks = expected(original, "mxfp4")
    tensors = [(name, tensor) for name, tensor in original.state_dict().items() if name.endswith("_bias")]
    for name, stack in stacks.items():
        codes, scales = stack.data.view(torch.uint8), stack.scale.view(torch.uint8)
        tensors.append((f"mlp.experts.{name}_blocks", codes.unflatten(-1, (-1, 16))))
        tensors.append((f"mlp.experts.{name}_scales", scales))
    return stacks, [*tensors, ("x.weight", torch.ones(64, 64, dtype=torch.bfloat16))]


def gpt_oss(inner: int = INNER) -> nn.Module:
    return nn.ModuleDict(
        {
            "mlp": Mlp("gpt-oss", inner=inner, device="meta"),
            "x": nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device="meta"),
        }
    )


def over_mxfp4(target: str) -> QuantizationConfig:
    source = QuantizationConfig.from_dict(MXFP4_SOURCE)
    return QuantizationConfig.from_online({"global_quant_config": target}, source=source)


def test_codes_of_gpt_oss_are_kept() -> None:
    stacks, tensors = blocks_and_scales(filled(model_of("gpt-oss")))
    model = gpt_oss()
    with OnlineQuantizer(model, over_mxfp4("ptpc_fp8"), write_report=False) as quantizer:
        quantizer.load_all(tensors)
    assert [layer.layer for layer in quantizer.report.layers] == ["x"]
    assert quantizer.report.kept[0].source == "mxfp4"
    for name, stack in stacks.items():
        codes, scales = held(model, name)
        assert torch.equal(codes, stack.data.view(torch.uint8))
        assert torch.equal(scales, stack.scale.view(torch.uint8))
    assert model["mlp"].experts.is_transposed is False
    assert quantizer.report.kept[0].nbytes == sum(stack.data.nbytes + stack.scale.nbytes for stack in stacks.values())


@pytest.mark.parametrize("inner", [[384], [256, 128]], ids=["one rank", "two ranks"])
def test_codes_of_gpt_oss_are_converted_if_asked_for(inner: list[int]) -> None:
    stacks, tensors = blocks_and_scales(filled(model_of("gpt-oss")))

    def work(ranks: ThreadRanks) -> nn.Module:
        model = gpt_oss(inner[ranks.rank])
        options = {"group": ranks, "parallel": {"*experts": "tensor"}, "write_report": False}
        with OnlineQuantizer(model, over_mxfp4("ptpc_fp8"), requantize_sources=["mxfp4"], **options) as quantizer:
            quantizer.load_all(tensors)
        return model

    for rank, model in enumerate(results(run_ranks(len(inner), work))):
        for name, stack in stacks.items():
            whole = quantize(dequantize(stack, torch.bfloat16), "ptpc_fp8")
            assert torch.equal(held(model, name)[0], pieces(whole, name, "gpt-oss", inner, rank)), name


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("target", TARGETS)
def test_on_a_gpu(original: nn.Module, family: str, target: str) -> None:
    model, streamed = copy_of(original, family).cuda(), model_of(family, device="meta")
    quantize_model(model, request_for(target), write_report=False)
    with OnlineQuantizer(streamed, request_for(target), device="cuda", write_report=False) as quantizer:
        quantizer.load_all(original.state_dict().items())
    for name, result in expected(original, target).items():
        for each in (model, streamed):
            for left, right in zip(held(each, name), parts(result), strict=True):
                assert torch.equal(left.cpu(), raw(right)), name
