"""Which modules a checkpoint holds, from names and shapes alone."""

from __future__ import annotations

import pytest

from quant_kernels.loading.headers import StoredTensor
from quant_kernels.loading.inventory import find_modules, has_input_side_last, is_embedding


def stored(name: str, *shape: int, dtype: str = "BF16") -> StoredTensor:
    return StoredTensor(name, dtype, shape, "model.safetensors", 0, 0)


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        ("embed_tokens", True),
        ("Embedding", True),
        ("word_embeddings", True),
        ("position_embeddings", True),
        ("wte", True),
        ("wpe", True),
        ("tok_emb", True),
        ("shared", True),
        ("relative_attention_bias", True),
        ("lm_head", False),
        ("shared_experts", False),
        ("gate", False),
        ("q_proj", False),
    ],
)
def test_embedding_list(segment: str, expected: bool) -> None:  # noqa: FBT001  (a parameter of the test)
    assert is_embedding(segment) is expected


@pytest.mark.parametrize(
    ("name", "shape", "module", "kind"),
    [
        ("lm_head.weight", (8, 4), "lm_head", "linear"),
        ("a.mlp.gate.weight", (8, 4), "a.mlp.gate", "linear"),
        ("a.embed_tokens.weight", (8, 4), "a.embed_tokens", "embedding"),
        ("a.norm.weight", (8,), "a.norm", "norm"),
        ("a.conv1d.weight", (8, 1, 4), "a.conv1d", "conv"),
        ("a.patch.proj.weight", (8, 3, 2, 2), "a.patch.proj", "conv"),
        ("a.experts.3.up_proj.weight", (8, 4), "a.experts", "moe"),
        ("experts.0.w1.weight", (8, 4), "experts", "moe"),
        ("a.experts.gate_up_proj", (2, 8, 4), "a.experts", "moe"),
        ("a.experts.w13.weight", (2, 8, 4), "a.experts", "moe"),
        ("a.block_sparse_moe.input_linear.weight", (2, 8, 4), "a.block_sparse_moe.input_linear", "moe"),
        ("a.shared_experts.up_proj.weight", (8, 4), "a.shared_experts.up_proj", "linear"),
        ("a.q_proj.weight_packed", (8, 4), "a.q_proj", "linear"),
        ("a.q_proj.qweight", (8, 4), "a.q_proj", "linear"),
    ],
)
def test_kind(name: str, shape: tuple[int, ...], module: str, kind: str) -> None:
    (found,) = find_modules([stored(name, *shape)]).values()
    assert (found.name, found.kind) == (module, kind)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a.q_proj.bias", (8,)),
        ("a.q_proj.weight_scale", (8, 1)),
        ("a.q_proj.weight_scale_inv", (8, 4)),
        ("a.mixer.A_log", (8, 4)),
        ("a.experts.gate_up_proj_bias", (2, 8)),
        ("a.experts.gate_up_proj_scale", (2, 8, 4)),
        ("a.experts.0.w1.bias", (8,)),
    ],
)
def test_other_tensors_are_no_modules(name: str, shape: tuple[int, ...]) -> None:
    assert not find_modules([stored(name, *shape)])


def test_experts_are_one_module_in_file_order() -> None:
    names = [f"m.experts.{n}.{leaf}.weight" for n in (10, 2, 0) for leaf in ("up_proj", "down_proj")]
    found = find_modules([stored(name, 8, 4) for name in names])["m.experts"]
    assert [weight.name for weight in found.weights] == names
    assert found.shapes == ((8, 4),)


@pytest.mark.parametrize(
    ("up", "down", "expected"),
    [((2, 8, 6), (2, 6, 4), True), ((2, 6, 8), (2, 4, 6), False), ((2, 6, 8), None, True)],
)
def test_orientation_of_stacks(up: tuple[int, ...], down: tuple[int, ...] | None, expected: bool) -> None:  # noqa: FBT001
    tensors = [stored("m.experts.gate_up_proj", *up)]
    if down is not None:
        tensors.append(stored("m.experts.down_proj", *down))
    assert has_input_side_last(find_modules(tensors)["m.experts"]) is expected
