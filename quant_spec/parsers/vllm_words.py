"""Rules for the words of vLLM's request: weights, activations, and the shorthands that a slot takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from quant_spec.dtypes import ELEMENT_TYPES
from quant_spec.errors import ConfigError, Defect
from quant_spec.formats import formats
from quant_spec.formats.base import FORMATS
from quant_spec.rules import Rule, Schema, any_case_schema, as_string
from quant_spec.vllm_names import ACTIVATION_NAMES, activation_key, weight_key, weight_words

if TYPE_CHECKING:
    from collections.abc import Callable

_ELEMENTS: Final = "|".join(re.escape(name) for name in ELEMENT_TYPES)
_SIZE: Final = "[1-9][0-9]{0,8}"
_WEIGHT_GRANULARITY: Final = f"per_tensor|per_channel|group_{_SIZE}|block_{_SIZE}x{_SIZE}"
_ACTIVATION_GRANULARITY: Final = f"per_tensor|per_token|group_{_SIZE}"


def _checked(read: Callable[[str], object]) -> Callable[[object], object]:
    def check(value: object) -> str:
        text = as_string(value)
        read(text)
        return text

    return check


def _slot(kind: str) -> Rule:
    def check(value: object) -> str:
        text = as_string(value)
        found = FORMATS.find(text) if text.strip().isascii() else None
        if found is not None and kind not in found.slots:
            problem = f"{text!r} is no format for {kind} layers"
            raise ConfigError(
                Defect("$", problem, text, _words_of(kind), f"it is for {' and '.join(found.slots)} layers")
            )
        weight_key(text)
        return text

    return Rule("string", check, lambda: _weight_schema(_words_of(kind)))


def _words_of(kind: str) -> tuple[str, ...]:
    other = {
        word for each in formats() if kind not in each.slots for word in (each.name, *each.aliases, *each.shorthands)
    }
    return tuple(word for word in weight_words() if word not in other)


def _weight_schema(words: tuple[str, ...]) -> Schema:
    return _with_keys(words, rf"^\s*(?:{_ELEMENTS})/(?:{_WEIGHT_GRANULARITY})\s*$")


def _activation_schema() -> Schema:
    shorts = "mxfp4|mxfp6_e2m3|mxfp6_e3m2|mxfp8|nvfp4"
    body = rf"(?:(?:{_ELEMENTS})/(?:{_ACTIVATION_GRANULARITY})|{shorts})"
    return _with_keys(tuple(ACTIVATION_NAMES), rf"^\s*{body}:(?:dynamic|static)\s*$")


def _with_keys(words: tuple[str, ...], pattern: str) -> Schema:
    """Return the schema of `words` in any case, or a key as `str(QuantKey)` prints it."""
    named = any_case_schema(words)
    choices = named["anyOf"]
    assert isinstance(choices, list)  # noqa: S101  (any_case_schema wrote it)
    return {"anyOf": [*choices, {"type": "string", "pattern": pattern}]}


WEIGHT: Final = Rule("string", _checked(weight_key), lambda: _weight_schema(weight_words()))
ACTIVATION: Final = Rule("string", _checked(activation_key), _activation_schema)
TARGET: Final = WEIGHT
SLOT_LINEAR: Final = _slot("linear")
SLOT_MOE: Final = _slot("moe")
