"""Fuzz configs: JSON text through the strict reader, every parser, and the resolver.

    python tests/torture/fuzz_config.py [--runs N] [--seconds N] [--seed N] [--unguided]

An input is a JSON text: a checkpoint's quantization object, a request, or `{"below": …, "request": …}` for both. What
it is asked for are the names of real models, names made of its own strings, and long ones; an answer must be the same a
second time, alone and among others, and a config must come back from its own document.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

from fuzzing import CASES, FindingError, Target, main, places

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES: Final = (
    *("lm_head", "model.layers.3.mlp.gate", "model.layers.0.self_attn.qkv_proj", "model.layers.11.mlp.experts"),
    *("a" * 300, "a.b." * 40 + "c", "experts." * 20 + "a", "\u00e9.A_1", "model.layers.3.mlp.experts.7.up_proj"),
)


def seeds() -> list[bytes]:
    """Return the documents of all cases, and a few of their pairs."""
    found: dict[bytes, None] = {b"{}": None}
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text("utf-8"))
        below = case.get("quantization_config")
        request = case.get("online_quant_config") or case.get("request")
        for document in (below, request):
            if isinstance(document, dict):
                found[json.dumps(document).encode()] = None
        if isinstance(request, dict):
            found[json.dumps({"below": below, "request": request}).encode()] = None
    return list(found)


def load() -> list[Target]:
    """Return the target."""
    return [Target("config", _target(), seeds)]


def _target() -> Callable[[bytes], str]:  # noqa: C901  (functions over what is imported late)
    from quant_spec import NameRules, QuantizationConfig, QuantSpecError
    from quant_spec.documents import load_json

    rules = NameRules(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, num_experts=4)

    def pair(document: object) -> QuantizationConfig:
        if not isinstance(document, dict) or "request" not in document:
            return QuantizationConfig()
        below = QuantizationConfig.from_dict(document.get("below"), names=rules)
        return QuantizationConfig.from_online(document["request"], source=below)

    readings: tuple[Callable[[object], QuantizationConfig], ...] = (
        QuantizationConfig.from_dict,  # type: ignore[arg-type]
        QuantizationConfig.from_online,
        lambda document: QuantizationConfig.from_online(document, names=rules, shorthand="mxfp8"),
        pair,
    )

    def attempt(reading: Callable[[object], QuantizationConfig], document: object) -> QuantizationConfig | None:
        try:
            return reading(document)
        except QuantSpecError as error:
            str(error).encode()
            return None

    def check_answer(config: QuantizationConfig, name: str) -> None:
        try:
            first = config.resolve(name)
        except QuantSpecError as error:
            str(error).encode("utf-8", "surrogatepass")
            return
        others = (config.resolve(name), config.resolve_many([name])[name], config.explain(name).config)
        if any(first != each for each in others):
            message = f"{name!r}: {first} and {others}"
            raise FindingError(message)

    def check_document(config: QuantizationConfig) -> None:
        config.digest()
        document = config.to_dict()
        if document is None or config.source is not None or config.quant_method in {None, "online"}:
            return
        if QuantizationConfig.from_dict(document, names=config.names) != config:
            message = "its own document gives another config"
            raise FindingError(message)

    def run(data: bytes) -> str:
        try:
            document = load_json(data)
        except QuantSpecError:
            return "no JSON"
        own = [each for pair in places(document) for each in (pair[1], pair[0][pair[1]]) if isinstance(each, str)]  # type: ignore[index]
        names = [*NAMES, *(text.replace("*", "x").removeprefix("re:")[:400] for text in own[:12])]
        configs = [each for reading in readings if (each := attempt(reading, document)) is not None]
        for config in configs:
            for name in names:
                check_answer(config, name)
            check_document(config)
        return "accepted" if any(config.quant_method for config in configs) else "refused, or asks for nothing"

    return run


if __name__ == "__main__":
    sys.exit(main(__file__, load, "quant_spec"))
