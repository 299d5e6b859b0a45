"""Shards quantized by ranks together equal the shards of the quantized whole weight, bit for bit."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import ThreadRanks, results, run_ranks

from quant_kernels import QuantizedTensor, dequantize, quantize
from quant_kernels.checks import KernelInputError, NonFiniteError
from quant_kernels.loading.distributed import OneRank
from quant_kernels.loading.parallel import Cut, ShardPlace, quantize_shard
from quant_spec import LoadError, get_format

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
RANKS = (1, 2, 3, 4, 8)


def sizes_of(side: int, ranks: int, multiple: int) -> list[int]:
    """Cut a side into multiples of a block, as evenly as that allows."""
    blocks = side // multiple
    return [(blocks // ranks + (rank < blocks % ranks)) * multiple for rank in range(ranks)]


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator) * torch.logspace(-3, 2, shape[-1])
    return values.to(torch.bfloat16)


def raw(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous().view(torch.uint8)


def assert_shard(part: QuantizedTensor, whole: QuantizedTensor, place: ShardPlace) -> None:
    """Compare a rank's result with the piece of the whole that it must be."""
    quant_format = get_format(str(part.key) if str(part.key) in FORMATS else _name(part))
    granularity = quant_format.weight.scale.granularity
    per_byte = quant_format.weight.element.per_byte
    start, stop = place.start, place.start + place.sizes[place.rank]
    if place.parallel == "column":
        data = whole.data[..., start:stop, :]
        step = getattr(granularity, "rows", 1)
        scale = whole.scale[..., start // step : -(-stop // step), :]
    else:
        data = whole.data[..., start // per_byte : stop // per_byte]
        step = getattr(granularity, "cols", None) or getattr(granularity, "group_size", None)
        scale = whole.scale[..., start // step : -(-stop // step)] if step else whole.scale
    assert torch.equal(raw(part.data), raw(data))
    assert torch.equal(raw(part.scale), raw(scale))
    assert (part.second_scale is None) == (whole.second_scale is None)
    if part.second_scale is not None:
        assert torch.equal(part.second_scale, whole.second_scale)


def _name(part: QuantizedTensor) -> str:
    return {"per_channel": "ptpc_fp8", "block_128x128": "per_block_fp8"}[str(part.key.scale.granularity)]


def sharded(
    whole: torch.Tensor, name: str, parallel: Cut, sizes: list[int], **options: object
) -> list[tuple[QuantizedTensor, ThreadRanks]]:
    axis = -2 if parallel == "column" else -1
    shards = whole.split(sizes, dim=axis)

    def work(ranks: ThreadRanks) -> tuple[QuantizedTensor, ThreadRanks]:
        return quantize_shard(shards[ranks.rank], name, parallel=parallel, group=ranks, **options), ranks

    return results(run_ranks(len(sizes), work))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("parallel", ["column", "row"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1024, 1280), (3, 1024, 1280)], ids=["matrix", "experts"])
def test_shards_equal_those_of_the_whole(name: str, parallel: Cut, ranks: int, shape: tuple[int, ...]) -> None:
    whole = weight(*shape)
    expected = quantize(whole, name)
    sizes = sizes_of(shape[-2 if parallel == "column" else -1], ranks, 128)
    for rank, (part, said) in enumerate(sharded(whole, name, parallel, sizes)):
        assert_shard(part, expected, ShardPlace(parallel, rank, tuple(sizes)))
        assert len(said.reductions) <= 1


@pytest.mark.parametrize("parallel", ["column", "row"])
@pytest.mark.parametrize("sizes", [[64] * 8, [192, 192, 128], [32, 480], [96, 416]], ids=str)
@pytest.mark.parametrize("stack", [(), (2,)], ids=["matrix", "experts"])
def test_cut_inside_a_block_of_128(parallel: Cut, sizes: list[int], stack: tuple[int, ...]) -> None:
    shape = (sum(sizes), 320) if parallel == "column" else (320, sum(sizes))
    whole = weight(*stack, *shape)
    expected = quantize(whole, "per_block_fp8")
    dense = dequantize(expected)
    for rank, (part, said) in enumerate(sharded(whole, "per_block_fp8", parallel, sizes)):
        place = ShardPlace(parallel, rank, tuple(sizes))
        assert_shard(part, expected, place)
        assert len(said.reductions) == 1
        cut = dense.split(sizes, dim=-2 if parallel == "column" else -1)[rank]
        assert torch.equal(dequantize(part, offset=place.block_offset), cut)


@pytest.mark.parametrize(
    ("name", "parallel", "numbers"),
    [
        ("ptpc_fp8", "row", 3 * 256),
        ("ptpc_fp8", "column", None),
        ("mxfp4", "row", None),
        ("mxfp8", "row", None),
        ("nvfp4", "row", 3),
        ("nvfp4", "column", 3),
        ("per_block_fp8", "row", None),
    ],
)
def test_only_shared_magnitudes_are_sent(name: str, parallel: Cut, numbers: int | None) -> None:
    for _, said in sharded(weight(3, 256, 256), name, parallel, [128, 128]):
        assert said.sent_bytes == (0 if numbers is None else 4 * (numbers + 1))


def test_two_megabytes_for_the_experts_of_a_large_model() -> None:
    """128 experts with 4096 output rows, cut along the input side: 2 MB agree on what takes 1.6 GB to gather."""
    shards = [torch.ones(128, 4096, 2, dtype=torch.bfloat16) for _ in range(2)]

    def work(ranks: ThreadRanks) -> int:
        quantize_shard(shards[ranks.rank], "ptpc_fp8", parallel="row", group=ranks)
        return ranks.sent_bytes

    assert results(run_ranks(2, work)) == [4 * (128 * 4096 + 1)] * 2


@pytest.mark.parametrize(("name", "size"), [("mxfp4", 48), ("mxfp8", 16), ("nvfp4", 24)])
def test_cut_inside_a_group_is_refused_with_the_numbers(name: str, size: int) -> None:
    answers = run_ranks(2, lambda ranks: quantize_shard(weight(64, size), name, parallel="row", group=ranks))
    for answer in answers:
        assert isinstance(answer, KernelInputError)
        assert f"input side of {2 * size}, {size} on each of 2 ranks" in str(answer)


@pytest.mark.parametrize(("name", "parallel"), [("ptpc_fp8", "row"), ("nvfp4", "column"), ("per_block_fp8", "row")])
def test_bad_value_on_one_rank_is_an_error_on_all(name: str, parallel: Cut) -> None:
    shards = [weight(64, 64, seed=rank) for rank in range(3)]
    shards[1][5, 7] = float("nan")

    def work(ranks: ThreadRanks) -> QuantizedTensor:
        return quantize_shard(shards[ranks.rank], name, parallel=parallel, group=ranks, check=True, name="down_proj")

    for answer in run_ranks(3, work):
        assert isinstance(answer, NonFiniteError)
        assert "down_proj" in str(answer)


def test_ranks_that_disagree_are_told_so() -> None:
    def work(ranks: ThreadRanks) -> QuantizedTensor:
        return quantize_shard(weight(64 + ranks.rank, 64), "ptpc_fp8", parallel="row", group=ranks, name="o_proj")

    for answer in run_ranks(2, work):
        assert isinstance(answer, LoadError)
        assert "o_proj" in str(answer)
        assert "[64]" in str(answer)
        assert "[65]" in str(answer)


def test_unchecked_bad_values_are_those_of_the_whole() -> None:
    whole = weight(64, 256)
    whole[3, 200], whole[4, 1] = float("nan"), float("inf")
    expected = quantize(whole, "ptpc_fp8")
    for rank, (part, _) in enumerate(sharded(whole, "ptpc_fp8", "row", [128, 128])):
        assert_shard(part, expected, ShardPlace("row", rank, (128, 128)))


def test_quantize_takes_a_group() -> None:
    whole = weight(64, 256)
    expected = quantize(whole, "ptpc_fp8")
    shards = whole.chunk(2, -1)
    answers = run_ranks(2, lambda ranks: quantize(shards[ranks.rank], "ptpc_fp8", parallel="row", group=ranks))
    for rank, part in enumerate(results(answers)):
        assert_shard(part, expected, ShardPlace("row", rank, (128, 128)))


def test_quantize_refuses_half_of_a_place() -> None:
    with pytest.raises(KernelInputError, match="group: found None; allowed: both parallel and group, or neither"):
        quantize(weight(64, 64), "ptpc_fp8", parallel="row")
    with pytest.raises(KernelInputError, match="parallel: found None"):
        quantize(weight(64, 64), "ptpc_fp8", group=OneRank())
    with pytest.raises(KernelInputError, match="amax: found a value; allowed: none together with group"):
        quantize(weight(64, 64), "ptpc_fp8", parallel="row", group=OneRank(), amax=torch.ones(64, 1))
