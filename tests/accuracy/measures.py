"""What a quantized model loses: perplexity, divergence of its predictions from the unquantized model's, cosines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


@attrs.frozen
class LanguageFigures:
    """Measures of a causal language model on a text.

    Attributes:
        perplexity: exponential of the mean negative log-likelihood of a token.
        divergence: mean of KL(unquantized ‖ quantized) over positions, in nats; 0.0 for the unquantized model itself.
        agreement: share of positions at which both models' likeliest token is the same.
        cosine: mean cosine of both models' logits over positions.
    """

    perplexity: float
    divergence: float
    agreement: float
    cosine: float


@torch.inference_mode()
def window_logits(model: PreTrainedModel, windows: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits of each window, scored by itself.

    Args:
        model: a causal language model.
        windows: token ids, int64 [count, tokens].

    Returns:
        For each window fp32 [tokens − 1, vocabulary]: what is predicted for each token but the first.
    """
    return [model(input_ids=ids[None]).logits[0, :-1].float() for ids in windows]


def language_figures(
    logits: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], windows: torch.Tensor
) -> LanguageFigures:
    """Compare predictions with the text and with those of the unquantized model.

    Args:
        logits: of the model, as `window_logits` gives them.
        reference: of the unquantized model.
        windows: token ids, int64 [count, tokens].
    """
    loss = divergence = agreement = cosine = 0.0
    for own, base, ids in zip(logits, reference, windows, strict=True):
        loss += float(functional.cross_entropy(own, ids[1:], reduction="sum"))
        mine, theirs = own.log_softmax(-1), base.log_softmax(-1)
        divergence += float(functional.kl_div(mine, theirs, reduction="sum", log_target=True))
        agreement += float((own.argmax(-1) == base.argmax(-1)).sum())
        cosine += float(functional.cosine_similarity(own, base).sum())
    count = windows.numel() - len(windows)
    return LanguageFigures(math.exp(loss / count), max(divergence, 0.0) / count, agreement / count, cosine / count)


@attrs.frozen
class EncoderFigures:
    """Measures of a sentence encoder.

    Attributes:
        worst: least cosine of a sentence's embedding with the unquantized model's.
        mean: their mean.
    """

    worst: float
    mean: float


def encoder_figures(embeddings: torch.Tensor, reference: torch.Tensor) -> EncoderFigures:
    """Compare normalized embeddings, fp32 [sentences, hidden size]."""
    cosines = (embeddings * reference).sum(-1)
    return EncoderFigures(float(cosines.min()), float(cosines.mean()))
