"""vLLM's `--quantization-config` as a request document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.quantization import QUANT_KEY_NAMES

from quant_spec import ConfigError, Defect

if TYPE_CHECKING:
    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec


def request_of(given: QuantizationConfigArgs) -> dict[str, object]:
    """Return the document that vLLM's parsed arguments stand for.

    Raises:
        ConfigError: they hold a key that has no name.
    """
    document: dict[str, object] = {}
    if given.targets is not None:
        document["targets"] = dict(given.targets)
    for kind in ("linear", "moe"):
        spec: QuantSpec | None = getattr(given, kind)
        if spec is not None:
            document[kind] = _named(spec, kind)
    if given.ignore:
        document["ignore"] = list(given.ignore)
    return document


def _named(spec: QuantSpec, kind: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for side in ("weight", "activation"):
        key = getattr(spec, side)
        if key is None:
            continue
        name = next((name for name, known in QUANT_KEY_NAMES.items() if known == key), None)
        if name is None:
            raise ConfigError(Defect(f"$.{kind}.{side}", "a key of vLLM without a name", str(key), (*QUANT_KEY_NAMES,)))
        found[side] = name
    return found
