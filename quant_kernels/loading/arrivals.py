"""Arrivals: which weight of which layer a checkpoint's tensor belongs to, told from its name.

A tensor may be a whole parameter, one projection of a fused one, one expert of a stack, one projection of one expert,
or the scales of any of these. Everything else that the model has a parameter or buffer for is copied as it is.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs

from quant_kernels.loading.modules import STACK_ROLES, LayerView, Role, WeightSlot, container_of
from quant_kernels.loading.sources import QUANTIZER_SCALE, SECOND_SUFFIX
from quant_spec import LoadError, NameRules
from quant_spec.errors import nearest
from quant_spec.stored import INPUT_SCALE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

Content: TypeAlias = Literal["weight", "scale", "second", "input_scale"]
"""What a tensor holds: values or codes, their scales, the scales' scale, or an old activation's scale."""

_STACK: Final = 3
_FUSED: Final[dict[Role, tuple[Role, ...]]] = {"gate": ("gate", "gate_up"), "up": ("up", "gate_up")}


@attrs.frozen
class Address:
    """Where a tensor goes.

    Attributes:
        layer: name of the layer.
        slot: index of the weight among the layer's slots.
        expert: index of the matrix in a stack; None: all of them, or no stack.
        shard: index of the projection in a fused weight; None: all of them.
        content: what the tensor holds.
        suffix: what its scales are called after the weight's own name, as `_scale_inv`.
    """

    layer: str
    slot: int
    expert: int | None = None
    shard: int | None = None
    content: Content = "weight"
    suffix: str = ""


@attrs.frozen
class OtherAddress:
    """A parameter or buffer that is copied as it is, or one projection's part of it.

    Attributes:
        name: of the parameter.
        shard: index of the projection in a fused one (its bias); None: all of it.
        shards: number of projections.
    """

    name: str
    shard: int | None = None
    shards: int = 1


@attrs.frozen
class Elsewhere:
    """A tensor that this rank has no use for: an expert of another rank, or one that the caller ignores."""


Destination: TypeAlias = Address | OtherAddress | Elsewhere


class Router:
    """Finds the destination of every tensor of a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, LayerView],
        names: NameRules,
        *,
        plain: frozenset[str],
        ignore: Sequence[str] = (),
        elsewhere: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        """Take a model.

        Args:
            model: its parameters may be on meta.
            layers: its layers.
            names: renames from checkpoint to module spelling, and fused modules.
            plain: names of weights that are copied as they are although a layer holds them (tied ones).
            ignore: globs over the names of tensors to skip.
            elsewhere: container -> global indices of the experts that other ranks hold.
        """
        self._names = names
        self._ignore = tuple(ignore)
        self._layers = layers
        self._elsewhere = elsewhere or {}
        self._by_weight: dict[str, Destination] = {}
        self._stacks: dict[str, dict[Role, int]] = defaultdict(dict)
        for layer in layers.values():
            for index, slot in enumerate(layer.slots):
                if slot.name not in plain:
                    self._add(layer, index, slot)
        self.others: dict[str, OtherAddress] = {}
        for name in _loadable(model):
            if name not in self._by_weight:
                self.others[name] = OtherAddress(name)
                parent, _, leaf = name.rpartition(".")
                shards = names.shards(parent)
                for shard, each in enumerate(shards):
                    self.others[f"{each}.{leaf}"] = OtherAddress(name, shard, len(shards))

    def _add(self, layer: LayerView, index: int, slot: WeightSlot) -> None:
        self._by_weight[slot.name] = Address(layer.name, index)
        if slot.role == "weight":
            for shard, name in enumerate(self._names.shards(slot.owner_name)):
                self._by_weight[f"{name}.{slot.attribute}"] = Address(layer.name, index, shard=shard)
        else:
            self._stacks[layer.name][slot.role] = index

    def find(self, name: str) -> Destination:
        """Return where the tensor called `name` goes.

        Raises:
            LoadError: the model has nothing for it.
        """
        if self._ignore and any(fnmatchcase(name, pattern) for pattern in self._ignore):
            return Elsewhere()
        known = self._by_weight.get(name)
        if known is not None and not self._names.name_mapping:
            return known
        renamed = self._names.to_module(name) if self._names.name_mapping else name
        for weight, content, suffix in _readings(renamed):
            found = self._by_weight.get(weight) or self._in_stack(weight)
            if found is not None:
                if content == "weight" or not isinstance(found, Address):
                    return found
                return Address(found.layer, found.slot, found.expert, found.shard, content, suffix)
        other = self.others.get(renamed)
        if other is not None:
            return other
        if self._is_of_another_rank(renamed):
            return Elsewhere()
        near = nearest(renamed, (*self._by_weight, *self.others))
        hint = f"; did you mean {near!r}?" if near else ""
        message = f"{name}: unexpected tensor: the model has no parameter for it{hint}"
        raise LoadError(message)

    def _is_of_another_rank(self, name: str) -> bool:
        """Tell whether a tensor that this rank has nothing for belongs to an expert that another rank holds."""
        container = container_of(name)
        index = name.removeprefix(container).lstrip(".").partition(".")[0]
        return index.isdigit() and int(index) in self._elsewhere.get(container, ())

    def _in_stack(self, weight: str) -> Destination | None:
        """Return where a stack under another name, or one expert's matrix, goes."""
        container = container_of(weight)
        stacks = self._stacks.get(container)
        if not stacks:
            return None
        found = self._find_in_stack(container, stacks, weight)
        if found is not None:
            self._by_weight[weight] = found  # its scales, and the other names of the layer, come next
        return found

    def _find_in_stack(self, container: str, stacks: Mapping[Role, int], weight: str) -> Destination | None:
        below = weight.removeprefix(container).lstrip(".").removesuffix(".weight").removesuffix("_weight")
        index, _, leaf = below.partition(".")
        role = STACK_ROLES.get(leaf if index.isdigit() else below)
        if role is None:
            return None
        found = self._projection(container, stacks, role)
        if found is None or not index.isdigit():
            return found
        ids = self._layers[container].expert_ids
        count = self._layers[container].slots[found.slot].shape[0]
        if ids is not None:
            return attrs.evolve(found, expert=ids.index(int(index))) if int(index) in ids else Elsewhere()
        return attrs.evolve(found, expert=int(index)) if int(index) < count else None

    def _projection(self, container: str, stacks: Mapping[Role, int], role: Role) -> Address | None:
        """Return the slot that holds a projection: by itself, or fused."""
        if role in stacks:
            return Address(container, stacks[role])
        for holder in _FUSED.get(role, ()):
            if holder in stacks:
                slot = self._layers[container].slots[stacks[holder]]
                return Address(container, stacks[holder], shard=slot.shards.index(role))
        return None


def _loadable(model: nn.Module) -> Iterator[str]:
    """Yield the names of what a checkpoint must hold: parameters and persistent buffers."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        lead = f"{prefix}." if prefix else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield lead + name


def _readings(name: str) -> Iterator[tuple[str, Content, str]]:
    """Yield every weight that a tensor's name could belong to, and what the tensor would hold."""
    yield name, "weight", ""
    for suffix, content in (
        (SECOND_SUFFIX, "second"),
        ("_scale_inv", "scale"),
        ("_scale", "scale"),
        ("_packed", "weight"),
        ("_blocks", "weight"),
        ("_scales", "scale"),
    ):
        if name.endswith(suffix):
            # gpt-oss spells codes and scales of its experts in the plural; they are known by the usual name here.
            said = "_scale" if suffix == "_scales" else suffix
            yield name.removesuffix(suffix), content, said  # type: ignore[misc]  # the words of Content
    if name.endswith(f".{QUANTIZER_SCALE}"):
        yield f"{name.removesuffix(QUANTIZER_SCALE)}weight", "scale", "_scale"
    for last in INPUT_SCALE_NAMES:
        if name.endswith(f".{last}"):
            yield f"{name.removesuffix(last)}weight", "input_scale", f".{last}"


def holders_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return parameter or buffer name -> every module and attribute that holds it; tied ones have several."""
    groups: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    names: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        lead = f"{prefix}." if prefix else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None:
                names[lead + name] = tensor
                groups[id(tensor)].append((module, name))
    return {name: groups[id(tensor)] for name, tensor in names.items()}
