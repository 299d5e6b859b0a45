"""Sentence embeddings of a BERT-like encoder, and how far two models' embeddings are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sun.",
    "Interest rates rose for the third time this year.",
    "The central bank tightened its policy again.",
    "Bread needs flour, water, salt and patience.",
    "The train to the coast leaves at seven.",
)


@torch.inference_mode()
def embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Mean-pooled, normalized embeddings of SENTENCES.

    Args:
        model: an encoder whose output has `last_hidden_state`.
        tokenizer: its tokenizer.

    Returns:
        fp32 of shape [number of sentences, hidden size], each row of length 1.
    """
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    hidden: torch.Tensor = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean.float(), dim=-1)


def worst_cosine(before: torch.Tensor, after: torch.Tensor) -> float:
    """Least cosine between corresponding rows of two matrices with normalized rows, fp32 [rows, columns]."""
    return float((before * after).sum(-1).min())
