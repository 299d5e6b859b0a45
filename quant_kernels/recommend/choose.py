"""Chooses a format for each unit: least error within a number of bytes, or least bytes above a signal-to-noise ratio.

Of a unit's formats, those on the lower convex hull of (bytes, error) can be best. All steps along all hulls are taken
in the order of error saved a byte until the bytes are used up; for a sum of errors this is the optimum but for the last
step.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs

from quant_kernels.recommend.measure import Measured, Option, Unit
from quant_spec import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Objective: TypeAlias = Literal["relative", "absolute", "output"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("relative", "absolute", "output")
"""Functions of the error that can be summed up: each unit's error relative to its own weights, times its number of
weights; the plain sum of squares; relative, counted four times for layers that write into the residual stream, and
twice at both ends of the model against its middle."""
WRITERS: Final = ("o_proj", "down_proj", "dense", "out_proj", "wo", "w2", "c_proj", "experts")
"""Last segments of the layers whose output is added to the residual stream."""
WRITER_WEIGHT: Final = 4.0
Granularity: TypeAlias = Literal["kind", "layer"]
GRANULARITIES: Final[tuple[Granularity, ...]] = ("kind", "layer")
"""One format for all layers of a kind as far as that goes, or each layer by itself."""


@attrs.frozen
class Point:
    """One point of the trade-off.

    Attributes:
        nbytes: of the checkpoint.
        error: value of the objective.
    """

    nbytes: int
    error: float


@attrs.frozen
class Chosen:
    """What was chosen.

    Attributes:
        options: unit's name -> option.
        nbytes: of the whole checkpoint.
        error: value of the objective.
        curve: the whole trade-off, from the fewest bytes to all layers as they are.
    """

    options: Mapping[str, Option]
    nbytes: int
    error: float
    curve: tuple[Point, ...]


def cost_function(objective: Objective) -> Callable[[Unit, Option], float]:
    """Return what an option of a unit adds to the objective."""

    def relative(unit: Unit, option: Option) -> float:
        return unit.elements * option.noise / unit.signal if unit.signal else 0.0

    def output(unit: Unit, option: Option) -> float:
        writes = unit.name.rpartition(".")[2] in WRITERS
        return relative(unit, option) * (WRITER_WEIGHT if writes else 1.0) * (1.0 + abs(2.0 * unit.depth - 1.0))

    def absolute(unit: Unit, option: Option) -> float:  # noqa: ARG001  (the others need it)
        return option.noise

    return {"relative": relative, "absolute": absolute, "output": output}[objective]


def choose_by_bytes(
    measured: Measured, max_bytes: int, *, objective: Objective = "absolute", granularity: Granularity = "kind"
) -> Chosen:
    """Return the options of least error within a number of bytes.

    Args:
        measured: the checkpoint.
        max_bytes: of the whole quantized checkpoint.
        objective: what is made small.
        granularity: `kind`: all layers of a kind take a step together, and at most one kind is split, layer by layer,
            to use up what is left; `layer`: each layer by itself.

    Raises:
        PlanError: the smallest formats take more bytes.
    """
    cost = cost_function(objective)
    state = {unit.name: unit.options[0] for unit in measured.units}
    nbytes = measured.other_nbytes + sum(option.nbytes for option in state.values())
    if nbytes > max_bytes:
        message = f"max_bytes: found {max_bytes}; the smallest formats take {nbytes}, all as it is {measured.nbytes}"
        raise PlanError(message)
    curve = _curve(measured, cost)
    groups: dict[str, list[Unit]] = defaultdict(list)
    for unit in measured.units:
        groups[unit.template if granularity == "kind" else unit.name].append(unit)
    steps = sorted((step for group in groups.values() for step in _steps(group, cost)), key=lambda step: -step.saving)
    blocked: set[str] = set()
    split = False
    for step in steps:
        if step.group in blocked:
            continue
        if nbytes + step.added <= max_bytes:
            state.update(step.options)
            nbytes += step.added
            continue
        blocked.add(step.group)
        if granularity == "kind" and not split and len(step.options) > 1:
            split = True
            units = groups[step.group]
            for unit in sorted(units, key=lambda unit: _saving(unit, state[unit.name], step.options[unit.name], cost)):
                added = step.options[unit.name].nbytes - state[unit.name].nbytes
                if nbytes + added <= max_bytes:
                    state[unit.name] = step.options[unit.name]
                    nbytes += added
    return Chosen(state, nbytes, sum(cost(unit, state[unit.name]) for unit in measured.units), curve)


def choose_by_sqnr(measured: Measured, min_sqnr_db: float, *, objective: Objective = "absolute") -> Chosen:
    """Return the smallest options with which no layer's signal-to-noise ratio is below a bound."""
    state = {}
    for unit in measured.units:
        fit = [option for option in unit.options if unit.sqnr_db(option) >= min_sqnr_db]
        state[unit.name] = min(fit or [unit.kept], key=lambda option: (option.nbytes, option.noise))
    cost = cost_function(objective)
    nbytes = measured.other_nbytes + sum(option.nbytes for option in state.values())
    error = sum(cost(unit, state[unit.name]) for unit in measured.units)
    return Chosen(state, nbytes, error, _curve(measured, cost))


@attrs.frozen
class _Step:
    """One step along the hull of a group: each unit's option after it."""

    group: str
    options: dict[str, Option]
    added: int
    saving: float


def _steps(group: Sequence[Unit], cost: Callable[[Unit, Option], float]) -> Iterator[_Step]:
    """Yield the steps of a group from its fewest bytes upwards; savings a byte never grow."""
    shared = set.intersection(*({option.format for option in unit.options} for unit in group))
    name = group[0].template if len(group) > 1 else group[0].name
    corners = []
    for format_name in shared:
        options = {unit.name: unit.option(format_name) for unit in group}
        nbytes = sum(option.nbytes for option in options.values())
        corners.append((nbytes, sum(cost(unit, options[unit.name]) for unit in group), options))
    first = {unit.name: unit.options[0] for unit in group}
    corners.append(
        (
            sum(option.nbytes for option in first.values()),
            sum(cost(unit, first[unit.name]) for unit in group),
            first,
        )
    )
    hull = _lower_hull(corners)
    for before, after in itertools.pairwise(hull):
        added = after[0] - before[0]
        yield _Step(name, after[2], added, (before[1] - after[1]) / added)


def _lower_hull(corners: Iterable[tuple[int, float, dict[str, Option]]]) -> list[tuple[int, float, dict[str, Option]]]:
    """Return the corners of the lower convex hull, from the fewest bytes on; errors fall along it."""
    hull: list[tuple[int, float, dict[str, Option]]] = []
    for corner in sorted(corners, key=lambda corner: corner[:2]):
        if hull and (corner[0] == hull[-1][0] or corner[1] >= hull[-1][1]):
            continue
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], corner):
            hull.pop()
        hull.append(corner)
    return hull


def _turns_up(a: tuple[int, float, object], b: tuple[int, float, object], c: tuple[int, float, object]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) >= (c[1] - b[1]) * (b[0] - a[0])


def _saving(unit: Unit, before: Option, after: Option, cost: Callable[[Unit, Option], float]) -> float:
    added = after.nbytes - before.nbytes
    return -(cost(unit, before) - cost(unit, after)) / added if added else -math.inf


def _curve(measured: Measured, cost: Callable[[Unit, Option], float]) -> tuple[Point, ...]:
    """Return the trade-off with each layer by itself."""
    steps = sorted((step for unit in measured.units for step in _steps([unit], cost)), key=lambda step: -step.saving)
    nbytes = measured.other_nbytes + sum(unit.options[0].nbytes for unit in measured.units)
    error = sum(cost(unit, unit.options[0]) for unit in measured.units)
    points = [Point(nbytes, error)]
    for step in steps:
        nbytes += step.added
        error = max(0.0, error - step.saving * step.added)
        points.append(Point(nbytes, error))
    return tuple(points)
