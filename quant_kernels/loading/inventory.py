"""Which modules a checkpoint holds, told from tensor names, dtypes and shapes alone.

A 2-D `X.weight` is a Linear layer unless the last segment of X says that it is an embedding (`is_embedding`: the one
list). Routed experts, stored one by one (`….experts.3.up_proj.weight`) or stacked (3-D `….experts.gate_up_proj`), are
one module, their container `….experts`, since an engine runs them with one kernel. A 1-D `X.weight` is a norm; any
other is a convolution. Biases and other parameters belong to no module that could be quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.loading.headers import StoredTensor
from quant_spec.decision import ModuleKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


EMBEDDING_PREFIXES: Final = ("embed",)
EMBEDDING_SUFFIXES: Final = ("embedding", "embeddings", "_embed", "_embeds", "_emb")
EMBEDDING_NAMES: Final = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "emb"})

WEIGHT_NAMES: Final = (".weight", ".weight_packed", ".qweight")
"""How the names of weights end: plain and FP8, packed by compressed-tensors, packed by GPTQ and AWQ."""

SCALE_SUFFIXES: Final = ("_scale_inv", "_scale_2", "_scale")
"""What is added to a weight's name for the scales stored beside it."""

EXPERTS: Final = "experts"
FLOAT_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
"""Dtypes of unquantized weights that can be quantized."""

_MATRIX: Final = 2
_STACK: Final = 3


def is_embedding(segment: str) -> bool:
    """Tell whether the last segment of a module's name says that it is an embedding table.

    Any case: `embed*`, `*embedding`, `*embeddings`, `*_embed`, `*_embeds`, `*_emb`, and `emb`, `wte`, `wpe`, `shared`,
    `relative_attention_bias`.

    >>> [is_embedding(name) for name in ("embed_tokens", "word_embeddings", "wte", "shared_experts", "lm_head")]
    [True, True, True, False, False]
    """
    lower = segment.lower()
    return lower in EMBEDDING_NAMES or lower.startswith(EMBEDDING_PREFIXES) or lower.endswith(EMBEDDING_SUFFIXES)


@attrs.frozen
class FoundModule:
    """A module and the tensors that are its weights.

    Attributes:
        name: dotted name; for routed experts that of the container.
        kind: `linear`, `moe`, `embedding`, `norm` or `conv`.
        weights: its weights, in the order of the files; one except for experts.
    """

    name: str
    kind: ModuleKind
    weights: tuple[StoredTensor, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Distinct shapes of the weights as stored."""
        return tuple(dict.fromkeys(weight.shape for weight in self.weights))


def find_modules(tensors: Iterable[StoredTensor]) -> dict[str, FoundModule]:
    """Return the modules of a checkpoint by name, in the order in which the tensors name them."""
    found: dict[str, tuple[ModuleKind, list[StoredTensor]]] = {}
    for tensor in tensors:
        name = tensor.name
        module = name[:-7] if name.endswith(".weight") else _other_weight(name, tensor)
        if not module:
            continue
        container = _container(module)
        if container:
            if len(tensor.shape) >= _MATRIX:
                found.setdefault(container, ("moe", []))[1].append(tensor)
            continue
        kind = _kind(module, tensor.shape)
        previous = found.setdefault(module, (kind, []))
        previous[1].append(tensor)
    return {name: FoundModule(name, kind, tuple(weights)) for name, (kind, weights) in found.items()}


def _other_weight(name: str, tensor: StoredTensor) -> str:
    """Return the module of a weight that is not called `X.weight`, or an empty string if the tensor is no weight."""
    for suffix in WEIGHT_NAMES[1:]:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    if len(tensor.shape) != _STACK:
        return ""
    parent, _, leaf = name.rpartition(".")
    stacked = parent.rpartition(".")[2] == EXPERTS and not leaf.endswith(("bias", *SCALE_SUFFIXES))
    return name if stacked else ""


def _container(module: str) -> str:
    """Return the name of the container of routed experts above a module, or an empty string."""
    at = f".{module}.".find(f".{EXPERTS}.")
    return module[: at + len(EXPERTS)] if at >= 0 else ""


def _kind(module: str, shape: tuple[int, ...]) -> ModuleKind:
    """Return the kind of a module that is no routed expert."""
    if is_embedding(module.rpartition(".")[2]):
        return "embedding"
    if len(shape) == _MATRIX:
        return "linear"
    if len(shape) < _MATRIX:
        return "norm"
    stacked = len(shape) == _STACK and any("expert" in part or "moe" in part for part in module.lower().split("."))
    return "moe" if stacked else "conv"


def has_input_side_last(module: FoundModule) -> bool:
    """Tell whether stacked expert weights are stored [E, N, K], input side last, as far as their shapes tell.

    A gate/up stack that fits the down stack only when both are read as [E, K, N] is stored the other way round
    (`gate_up` [E, H, 2·I] beside `down` [E, I, H]).
    """
    if len(module.weights[0].shape) != _STACK:
        return True
    stacks = {weight.name.removesuffix(".weight").rpartition(".")[2]: weight.shape for weight in module.weights}
    up = next((shape for leaf, shape in stacks.items() if "gate_up" in leaf or "w13" in leaf), None)
    down = next((shape for leaf, shape in stacks.items() if "down" in leaf or "w2" in leaf), None)
    if up is None or down is None or len(up) != _STACK or len(down) != _STACK:
        return True
    return not (up[1] == down[2] and up[2] == 2 * down[1])


def weights_of(module: FoundModule) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each weight with the name that its scales are called after (`X.weight`, `X.experts.gate_up_proj`)."""
    for weight in module.weights:
        yield weight.name.removesuffix("_packed"), weight
