"""Placement: how each layer is spread over the ranks, as its module or the caller says; all ranks must agree."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs

from quant_kernels.loading.distributed import Ranks, together
from quant_kernels.loading.parallel import Cut, ShardPlace
from quant_spec import LoadError, PlanError
from quant_spec.errors import nearest, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_kernels.loading.modules import LayerView, WeightSlot

Style: TypeAlias = Literal["column", "row", "tensor", "expert", "replicated"]
STYLES: Final[tuple[Style, ...]] = ("column", "row", "tensor", "expert", "replicated")
"""How a layer is spread: output side cut; input side cut; experts cut, gate and up by column and down by row; whole
experts on different ranks; the same on all."""
STYLE_ATTRIBUTE: Final = "quant_parallel"
"""Attribute by which a module says its style."""
_BY_CLASS: Final[tuple[tuple[str, Style], ...]] = (
    ("RowParallel", "row"),
    ("ColumnParallel", "column"),
    ("QKVParallel", "column"),
    ("ParallelLMHead", "column"),
)
_DOWN: Final = frozenset({"down_proj", "w2", "down"})


@attrs.frozen
class LayerPlacement:
    """How one layer is spread.

    Attributes:
        style: in one word.
        places: where this rank's piece of each weight lies, in the order of the layer's slots.
        whole_shapes: shapes of the whole weights, in the same order.
        experts: global indices of all experts of a layer of style `expert`, over all ranks; () otherwise.
        own_experts: those of this rank.
    """

    style: Style
    places: tuple[ShardPlace, ...]
    whole_shapes: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...] = ()
    own_experts: tuple[int, ...] = ()

    @property
    def is_spread(self) -> bool:
        """True if ranks hold different values."""
        return self.style != "replicated"


@attrs.frozen
class _Told:
    """What a rank says of one layer."""

    style: Style
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    shard_rows: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]


def place_layers(
    layers: Mapping[str, LayerView], ranks: Ranks, given: Mapping[str, str] | None, *, agreed_on: str
) -> dict[str, LayerPlacement]:
    """Return how every layer that has weights is spread; all ranks must see the same model in the same way.

    Args:
        layers: this rank's layers.
        ranks: the group.
        given: glob over layer names -> style; the first that fits counts, before what modules say.
        agreed_on: text that must be equal on all ranks: the config's digest and the options.

    Raises:
        PlanError: a style is unknown, or no layer of several ranks says how it is cut.
        LoadError: the ranks disagree, or one does not answer.
    """
    if ranks.size == 1:
        whole = ShardPlace()
        weighty = ((name, [slot.shape for slot in view.slots]) for name, view in layers.items() if view.slots)
        return {name: LayerPlacement("replicated", (whole,) * len(shapes), tuple(shapes)) for name, shapes in weighty}

    def tell() -> tuple[str, dict[str, _Told]]:
        own = {name: _told(view, given or {}, ranks.size) for name, view in layers.items() if view.slots}
        if ranks.size > 1 and own and all(told.style == "replicated" for told in own.values()):
            message = (
                f"no layer says how it is cut over {ranks.size} ranks: pass parallel={{'*.o_proj': 'row', …}} or set"
                f" {STYLE_ATTRIBUTE!r} on the modules; allowed: {', '.join(STYLES)}"
            )
            raise PlanError(message)
        return agreed_on, own

    answers = together(ranks, "comparing configs and shapes", tell)
    for rank, (digest, _) in enumerate(answers):
        if digest != agreed_on:
            message = f"rank {rank} has another config or other options than rank {ranks.rank}: {digest}; {agreed_on}"
            raise LoadError(message)
    everyone = [told for _, told in answers]
    _compare_names(everyone)
    return {name: _placement(name, [each[name] for each in everyone], ranks.rank) for name in everyone[ranks.rank]}


def style_of(view: LayerView, given: Mapping[str, str], size: int) -> Style:
    """Return how a layer is spread over `size` ranks.

    Raises:
        PlanError: the word is unknown.
    """
    if size == 1:
        return "replicated"
    said = next((style for pattern, style in given.items() if fnmatchcase(view.name, pattern)), None)
    where = f"parallel: {view.name}"
    if said is None:
        said = getattr(view.module, STYLE_ATTRIBUTE, None)
        where = f"{view.name}.{STYLE_ATTRIBUTE}"
    if said is None:
        return _style_by_class(view)
    for style in STYLES:
        if style == said:
            return style
    near = nearest(said, STYLES)
    hint = f"; did you mean {near!r}?" if near else ""
    message = f"{where}: unknown style {shown(said)}; allowed: {', '.join(STYLES)}{hint}"
    raise PlanError(message)


def _style_by_class(view: LayerView) -> Style:
    module = view.module
    if view.kind == "moe":
        if view.expert_ids is not None or _count(module, "ep_size") > 1:
            return "expert"
        return "tensor" if _count(module, "tp_size") > 1 else "replicated"
    return next((style for word, style in _BY_CLASS if word in view.class_name), "replicated")


def _count(module: object, attribute: str) -> int:
    said = getattr(module, attribute, 1)
    return said if isinstance(said, int) else 1


def cut_of(slot: WeightSlot, style: Style) -> Cut | None:
    """Return the side along which a weight is cut, or None."""
    if style in ("column", "row"):
        return style
    if style != "tensor":
        return None
    down = slot.role == "down" or (slot.role == "weight" and slot.owner_name.rpartition(".")[2] in _DOWN)
    return "row" if down else "column"


def _told(view: LayerView, given: Mapping[str, str], size: int) -> _Told:
    style = style_of(view, given, size)
    rows = []
    for slot in view.slots:
        # Rows of projections that lie in turn are cut as those of one projection are.
        fused = () if slot.interleaved else slot.shard_rows or ()
        if len(slot.shards) > 1 and not fused and not slot.interleaved:
            each, left = divmod(slot.shape[-2], len(slot.shards))
            fused = (each + bool(left),) * len(slot.shards)
        rows.append(tuple(fused) if len(fused) > 1 else ())
    experts: tuple[int, ...] = ()
    if style == "expert":
        experts = view.expert_ids or _ids_in_names(view)
    cuts = tuple(cut_of(slot, style) or "" for slot in view.slots)
    names = tuple(f"{slot.name} {cut}".strip() for slot, cut in zip(view.slots, cuts, strict=True))
    return _Told(style, tuple(slot.shape for slot in view.slots), names, tuple(rows), experts)


def _ids_in_names(view: LayerView) -> tuple[int, ...]:
    """Return the expert indices in the names of per-expert Linears, else the local indices of a stack."""
    found = set()
    for slot in view.slots:
        below = slot.owner_name.removeprefix(view.name).lstrip(".").partition(".")[0]
        if below.isdigit():
            found.add(int(below))
    if not found and view.slots:
        return tuple(range(view.slots[0].shape[0]))
    return tuple(sorted(found))


def _compare_names(everyone: list[dict[str, _Told]]) -> None:
    first = everyone[0]
    for rank, told in enumerate(everyone):
        if told.keys() != first.keys():
            missing = [name for name in first if name not in told]
            extra = [name for name in told if name not in first]
            detail = f"lacks {missing[0]}" if missing else f"has {extra[0]} too"
            message = f"rank {rank} has other layers than rank 0: it {detail}"
            raise LoadError(message)


def _placement(name: str, everyone: list[_Told], rank: int) -> LayerPlacement:
    own = everyone[rank]
    for other, told in enumerate(everyone):
        if told.style != own.style:
            message = f"{name}: rank {other} says {told.style}, rank {rank} {own.style}"
            raise LoadError(message)
    if own.style == "expert":
        return _spread_experts(name, everyone, rank)
    places, shapes = [], []
    for index, label in enumerate(own.names):
        if any(len(told.names) <= index or told.names[index] != label for told in everyone):
            message = f"{name}: its weights differ between ranks; rank {rank} has {label}"
            raise LoadError(message)
        place, shape = _place(label, [told.shapes[index] for told in everyone], everyone, index, rank)
        places.append(place)
        shapes.append(shape)
    return LayerPlacement(own.style, tuple(places), tuple(shapes))


def _place(
    label: str, shapes: list[tuple[int, ...]], everyone: list[_Told], index: int, rank: int
) -> tuple[ShardPlace, tuple[int, ...]]:
    """Return where this rank's piece lies, and the shape of the whole."""
    cut: Cut | None = "column" if label.endswith(" column") else "row" if label.endswith(" row") else None
    side = {"column": -2, "row": -1, None: 0}[cut]
    own = shapes[rank]
    for other, shape in enumerate(shapes):
        same = len(shape) == len(own)
        kept = [axis for axis in range(-len(own), 0) if axis != side]
        if not same or any(shape[axis] != own[axis] for axis in kept):
            name = label.rpartition(" ")[0] if cut else label
            message = (
                f"{name}: shape {list(shape)} on rank {other}, {list(own)} on rank {rank}; style {cut or 'replicated'}"
            )
            raise LoadError(message)
    if cut is None:
        return ShardPlace(), own
    sizes = tuple(shape[side] for shape in shapes)
    fused = tuple(rows for told in everyone for rows in told.shard_rows[index])
    whole = list(own)
    whole[side] = sum(sizes)
    return ShardPlace(cut, rank, sizes, fused), tuple(whole)


def _spread_experts(name: str, everyone: list[_Told], rank: int) -> LayerPlacement:
    own = everyone[rank]
    seen: dict[int, int] = {}
    for other, told in enumerate(everyone):
        for expert in told.experts:
            if expert in seen:
                message = f"{name}: expert {expert} is on rank {seen[expert]} and on rank {other}"
                raise LoadError(message)
            seen[expert] = other
    places = tuple(ShardPlace() for _ in own.names)
    stacked = {told.shapes for told in everyone if told.shapes and len(told.shapes[0]) > 2}  # noqa: PLR2004  (a stack)
    if len({tuple(shape[1:] for shape in shapes) for shapes in stacked}) > 1:
        message = f"{name}: its experts have other shapes on other ranks: {sorted(stacked)}"
        raise LoadError(message)
    whole = tuple((len(seen), *shape[1:]) if stacked else shape for shape in own.shapes)
    return LayerPlacement("expert", places, whole, tuple(sorted(seen)), own.experts)
