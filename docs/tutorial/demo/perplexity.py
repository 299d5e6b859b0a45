"""Perplexity of a causal language model on a fixed English text."""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS = 2048
WINDOW = 256


def evaluation_tokens(tokenizer: PreTrainedTokenizerBase, count: int = TOKENS) -> torch.Tensor:
    """The first `count` tokens of the text that Python's own `help()` topics make.

    Args:
        tokenizer: the model's tokenizer.
        count: how many tokens.

    Returns:
        Token ids, int64 of shape [count].
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    # A token spans well under 16 characters: no need to tokenize the whole text.
    ids: list[int] = tokenizer(text[: 16 * count]).input_ids
    return torch.tensor(ids[:count])


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor, window: int = WINDOW) -> float:
    """Exponential of the mean negative log-likelihood a token, windows scored independently.

    Args:
        model: a causal language model.
        tokens: token ids, int64 of shape [count]; a last, shorter window is dropped.
        window: tokens a window; each predicts its own tokens but the first.

    Returns:
        The perplexity.
    """
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    total = 0.0
    for ids in windows:
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
    return math.exp(total / (windows.numel() - len(windows)))


@torch.inference_mode()
def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int = 24) -> str:
    """What the model answers to `prompt`, decoded greedily.

    Args:
        model: an instruction-tuned causal language model.
        tokenizer: its tokenizer, with a chat template or without.
        prompt: the user's message.
        length: the most new tokens.

    Returns:
        The answer alone, on one line.
    """
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    ids = torch.tensor([tokenizer(prompt).input_ids])
    mask = torch.ones_like(ids)
    config = GenerationConfig(max_new_tokens=length, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    arguments = {"input_ids": ids, "attention_mask": mask, "generation_config": config}
    out: torch.Tensor = model.generate(**arguments)  # type: ignore[operator]  # a mixin mypy does not see
    answer = tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return " ".join(str(answer).split())
