"""Views: which modules of a torch model hold weights that can be quantized, and what each of their parameters is.

A view is a small function that looks at one module and names the weights that it holds itself. Two are built in:

- Linear-like: a parameter `weight` with two sides [output, input], unless the module is an embedding table or a
  convolution;
- fused-MoE-like: stacks [expert, output, input] called `gate_up_proj` or `w13_weight`, `down_proj` or `w2_weight`, or
  `gate_proj`, `up_proj` (`w1`, `w3`) by themselves. Stacks may be stored [expert, input, output] instead (gpt-oss,
  Llama-4): the module says `is_transposed = True`, or the shapes of gate_up and down tell. They are read as they lie
  and leave as [expert, output, input], with `is_transposed` set to False.

All weights below a module called `experts` are one layer, since one kernel runs them: stacks and per-expert Linears
alike. Other views are passed as `views=`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from quant_kernels.loading.inventory import EXPERTS, is_embedding
from quant_spec import LoadError
from quant_spec.decision import ModuleKind

if TYPE_CHECKING:
    from quant_spec import NameRules

Role: TypeAlias = Literal["weight", "gate_up", "gate", "up", "down"]
ROLES: Final[tuple[Role, ...]] = ("weight", "gate_up", "gate", "up", "down")
"""What a parameter is: a Linear's weight, or one of the projections of a gated MLP."""
GateUpOrder: TypeAlias = Literal["gate_up", "up_gate", "interleaved"]
GATE_UP_ORDERS: Final[tuple[GateUpOrder, ...]] = ("gate_up", "up_gate", "interleaved")
"""How the rows of a fused gate and up projection lie: one after the other, or in turn."""

STACK_ROLES: Final[dict[str, Role]] = {
    "gate_up_proj": "gate_up",
    "gate_up": "gate_up",
    "w13": "gate_up",
    "down_proj": "down",
    "w2": "down",
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
}
"""Names of stacked expert weights, with or without `_weight` behind them."""

_PACKED: Final = (torch.uint8, torch.float4_e2m1fn_x2)
_MATRIX: Final = 2
_STACK: Final = 3
_WIDTHS: Final = ("logical_widths", "output_partition_sizes", "output_sizes")
"""Attributes in which engines keep the rows of each shard of a fused Linear."""
TRANSPOSED_ATTRIBUTE: Final = "is_transposed"
"""Attribute by which a module says that its stacks lie [expert, input, output]."""
TRANSPOSED: Final = (
    "its quantized experts are stored as [expert, input, output]; only [expert, output, input] can be converted"
)


@attrs.frozen(eq=False)
class WeightSlot:
    """One parameter that holds a weight.

    Attributes:
        owner_name: dotted name of the module that holds the parameter.
        owner: that module.
        attribute: the parameter's name within it.
        role: what it is.
        shards: last segments of the names of the projections whose rows lie in it one after the other; () if one.
        shard_rows: rows of each shard, if the module says so.
        interleaved: True if the rows of two shards lie in turn.
        transposed: True if the parameter lies [E, K, N]; shapes, rows and shards are those of [E, N, K] all the same.
    """

    owner_name: str
    owner: nn.Module
    attribute: str
    role: Role = "weight"
    shards: tuple[str, ...] = ()
    shard_rows: tuple[int, ...] | None = None
    interleaved: bool = False
    transposed: bool = False

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return f"{self.owner_name}.{self.attribute}" if self.owner_name else self.attribute

    @property
    def tensor(self) -> Tensor:
        """The parameter (or buffer)."""
        found: Tensor | None = self.owner._parameters.get(self.attribute)  # noqa: SLF001  (getattr of a module takes five times as long)
        if found is None:
            found = self.owner._buffers[self.attribute]  # noqa: SLF001
        assert found is not None  # noqa: S101  (a view names tensors alone)
        return found

    @property
    def matrix(self) -> Tensor:
        """The parameter as [N, K] or [E, N, K]: a view."""
        return self.tensor.transpose(-1, -2) if self.transposed else self.tensor

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape [N, K] or [E, N, K] of the weight, in elements: packed 4-bit codes count twice."""
        tensor = self.matrix
        *lead, last = tensor.shape
        return (*lead, last * (2 if tensor.dtype in _PACKED else 1))


@attrs.frozen(eq=False)
class LayerView:
    """One layer: what a config decides about, what is converted in one go, and one entry of the report.

    Attributes:
        name: the module's name; for routed experts that of the container.
        kind: `linear`, `moe`, `embedding`, `norm` or `conv`.
        class_name: class of the module.
        slots: its weights; empty for kinds that are not quantized.
        obstacle: why it cannot be converted whatever is asked for; empty: nothing is known against it.
        expert_ids: global index of each local expert of a stack; None: 0, 1, … (all experts are here).
        module: the module itself; None: the model has none of that name.
    """

    name: str
    kind: ModuleKind
    class_name: str
    slots: tuple[WeightSlot, ...] = ()
    obstacle: str = ""
    expert_ids: tuple[int, ...] | None = None
    module: nn.Module | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Distinct shapes of its weights, in elements."""
        return tuple(dict.fromkeys(slot.shape for slot in self.slots))

    @property
    def weights(self) -> int:
        """Number of weight matrices; each expert of a stack counts."""
        return sum(slot.shape[0] if len(slot.shape) == _STACK else 1 for slot in self.slots)

    def expert_id(self, local: int) -> int:
        """Return the global index of a local expert of a stack."""
        return local if self.expert_ids is None else self.expert_ids[local]


ModuleView: TypeAlias = Callable[[str, nn.Module], Iterable[WeightSlot]]
"""Names the weights that a module holds itself, given the module's dotted name."""


def linear_view(name: str, module: nn.Module) -> Iterator[WeightSlot]:
    """Yield the 2-D `weight` of a module that is neither an embedding nor a convolution."""
    weight = _own_weight(module)
    if weight is not None and weight.dim() == _MATRIX and _other_kind(name, module) is None:
        yield WeightSlot(name, module, "weight", shard_rows=_widths(module, weight.shape[0]))


def stacked_experts_view(name: str, module: nn.Module) -> Iterator[WeightSlot]:
    """Yield the stacks of a fused-MoE-like module, or of a module that is one such stack."""
    order = gate_up_order(name, module)
    transposed = getattr(module, TRANSPOSED_ATTRIBUTE, False) is True
    for attribute, tensor in own_tensors(module).items():
        if tensor.dim() != _STACK:
            continue
        stem = name.rpartition(".")[2] if attribute == "weight" else attribute.removesuffix("_weight")
        role = STACK_ROLES.get(stem)
        if role is None:
            continue
        fused = role == "gate_up"
        shards = ("up", "gate") if order == "up_gate" else ("gate", "up")
        rows = (tensor.shape[-1 if transposed else -2] // 2,) * 2
        yield WeightSlot(
            name,
            module,
            attribute,
            role,
            shards=shards if fused else (),
            shard_rows=rows if fused else None,
            interleaved=fused and order == "interleaved",
            transposed=transposed,
        )


VIEWS: Final[tuple[ModuleView, ...]] = (linear_view, stacked_experts_view)
"""The built-in views, in the order in which they are asked; the first that names anything counts."""


def gate_up_order(name: str, module: nn.Module) -> GateUpOrder:
    """Return how gate and up lie in a fused stack: the module's `gate_up_order`, else gate first.

    Modules of transformers that interleave them say `is_concatenated = False`.

    Raises:
        ValueError: `gate_up_order` is none of `gate_up`, `up_gate`, `interleaved`.
    """
    if getattr(module, "is_concatenated", True) is False:
        return "interleaved"
    said = getattr(module, "gate_up_order", "gate_up")
    for order in GATE_UP_ORDERS:
        if order == said:
            return order
    message = f"{name}.gate_up_order: found {said!r}; allowed: {', '.join(GATE_UP_ORDERS)}"
    raise ValueError(message)


def _own_weight(module: nn.Module) -> Tensor | None:
    found: Tensor | None = module._parameters.get("weight")  # noqa: SLF001  (cheaper than getattr)
    return module._buffers.get("weight") if found is None else found  # noqa: SLF001


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module holds itself."""
    buffers = {key: value for key, value in module._buffers.items() if value is not None}  # noqa: SLF001  (cheaper than named_buffers)
    return {**buffers, **{key: value for key, value in module._parameters.items() if value is not None}}  # noqa: SLF001


def find_layers(model: nn.Module, names: NameRules, views: Sequence[ModuleView] = VIEWS) -> dict[str, LayerView]:
    """Return the layers of a model by name, in the model's order, those of kinds that are not quantized included.

    Args:
        model: the model; its parameters may be on meta.
        names: tells which modules are fused from which shards.
        views: what tells weights from other parameters.
    """
    return layers_among(model.named_modules(), names, views)


def layers_among(
    modules: Iterable[tuple[str, nn.Module]], names: NameRules, views: Sequence[ModuleView] = VIEWS
) -> dict[str, LayerView]:
    """Return the layers among modules given with their names; as `find_layers`."""
    slots: dict[str, list[WeightSlot]] = {}
    kinds: dict[str, tuple[ModuleKind, str]] = {}
    holders: dict[str, nn.Module] = {}
    for name, module in modules:
        found = next((each for each in ([*view(name, module)] for view in views) if each), [])
        if not found:
            kind = _other_kind(name, module)
            if kind is not None:
                kinds[name] = (kind, type(module).__name__)
            elif name.rpartition(".")[2] == EXPERTS:
                holders[name] = module
            continue
        container = container_of(name)
        layer = container or name
        holders.setdefault(layer, module)
        stacked = any(slot.role != "weight" for slot in found)
        kinds.setdefault(layer, ("moe" if container or stacked else "linear", type(holders[layer]).__name__))
        fused = names.shards(name)
        for slot in found:
            segments = tuple(shard.rpartition(".")[2] for shard in fused)
            named = attrs.evolve(slot, shards=segments) if segments and slot.role == "weight" else slot
            slots.setdefault(layer, []).append(named)
    return {name: _layer(name, *kind, slots.get(name, []), holders.get(name)) for name, kind in kinds.items()}


def container_of(name: str) -> str:
    """Return the name of the container of routed experts that a module is or lies below, or an empty string.

    >>> container_of("model.layers.0.mlp.experts.3.up_proj"), container_of("model.layers.0.mlp.shared_experts.up_proj")
    ('model.layers.0.mlp.experts', '')
    """
    at = f".{name}.".find(f".{EXPERTS}.")
    return name[: at + len(EXPERTS)] if at >= 0 else ""


def _layer(
    name: str, kind: ModuleKind, class_name: str, slots: list[WeightSlot], holder: nn.Module | None
) -> LayerView:
    for slot in slots:
        _check_plain(slot)
    stacks = [slot for slot in slots if slot.role != "weight"]
    if _shapes_are_transposed(stacks):
        slots = [_turned(slot) if slot.role != "weight" else slot for slot in slots]
        stacks = [slot for slot in slots if slot.role != "weight"]
    ids = None
    if stacks:
        ids = _expert_ids(holder) or _expert_ids(stacks[0].owner)
    if ids is not None and len(ids) != stacks[0].shape[0]:
        message = f"{name}.expert_ids: {len(ids)} indices for {stacks[0].shape[0]} local experts"
        raise ValueError(message)
    return LayerView(name, kind, class_name, tuple(slots), expert_ids=ids, module=holder)


def _check_plain(slot: WeightSlot) -> None:
    """Refuse a parameter that stands for pieces on several devices.

    Raises:
        LoadError: it is a DTensor.
    """
    if not hasattr(slot.tensor, "placements"):
        return
    placements = ", ".join(map(repr, getattr(slot.tensor, "placements", ())))
    message = (
        f"{slot.name}: a {type(slot.tensor).__name__} ({placements}); allowed: plain tensors. Put its local tensor"
        " (`to_local()`) in its place, and pass group= and parallel="
    )
    raise LoadError(message)


def _expert_ids(module: nn.Module | None) -> tuple[int, ...] | None:
    """Return the global indices of local experts: `expert_ids`, or vLLM's `expert_map` (global -> local)."""
    if module is None:
        return None
    said = getattr(module, "expert_ids", None)
    if said is not None:
        return tuple(int(index) for index in said)
    local_of = getattr(module, "expert_map", None)
    if isinstance(local_of, Tensor):
        pairs = [(local, index) for index, local in enumerate(local_of.tolist()) if local >= 0]
        return tuple(index for _, index in sorted(pairs))
    return None


def _shapes_are_transposed(stacks: Sequence[WeightSlot]) -> bool:
    """Tell whether shapes that nobody called transposed can only be [expert, input, output]."""
    if any(slot.transposed for slot in stacks):
        return False
    shapes = {slot.role: slot.shape for slot in stacks}
    if "gate_up" not in shapes or "down" not in shapes:
        return False
    up, down = shapes["gate_up"], shapes["down"]
    if up[1] == 2 * down[2] and up[2] == down[1]:
        return False
    return up[1] == down[2] and up[2] == 2 * down[1]


def _turned(slot: WeightSlot) -> WeightSlot:
    """Return a stack as one that is stored [expert, input, output]."""
    rows = (slot.tensor.shape[-1] // 2,) * 2 if slot.shard_rows else None
    return attrs.evolve(slot, transposed=True, shard_rows=rows)


def _widths(module: nn.Module, rows: int) -> tuple[int, ...] | None:
    for attribute in _WIDTHS:
        said = getattr(module, attribute, None)
        if isinstance(said, (list, tuple)) and len(said) > 1 and sum(said) == rows:
            return tuple(int(each) for each in said)
    return None


def _other_kind(name: str, module: nn.Module) -> ModuleKind | None:
    """Return the kind of a module whose weight is not quantized, or None."""
    weight = _own_weight(module)
    if weight is None:
        return None
    class_name = type(module).__name__
    embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in class_name
    if embeds or (is_embedding(name.rpartition(".")[2]) and weight.dim() == _MATRIX):
        return "embedding"
    if weight.dim() < _MATRIX:
        return "norm"
    convolves = "Conv" in class_name or weight.dim() > _STACK
    stacked = weight.dim() == _STACK and name.rpartition(".")[2] in STACK_ROLES
    return "conv" if convolves or (weight.dim() == _STACK and not stacked) else None
