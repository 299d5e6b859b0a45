"""A recommendation: the request, and for each layer why it got its format."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import attrs

from quant_kernels.recommend.choose import (
    GRANULARITIES,
    OBJECTIVES,
    Chosen,
    Objective,
    Point,
    choose_by_bytes,
    choose_by_sqnr,
    cost_function,
)
from quant_kernels.recommend.globs import request_of
from quant_kernels.recommend.measure import Measured, Option, Unit
from quant_spec import PlanError
from quant_spec.errors import nearest, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

Word = TypeVar("Word", bound=str)


@attrs.frozen
class Reason:
    """One unit's format and why.

    Attributes:
        unit: the unit.
        option: its format.
        text: in words.
    """

    unit: Unit
    option: Option
    text: str


@attrs.frozen
class Recommendation:
    """What to ask for.

    Attributes:
        request: an `online_quant_config`.
        reasons: one a unit, in the checkpoint's order.
        measured: what it was chosen from.
        chosen: what was chosen.
        whole: format -> the point of all layers in that format.
    """

    request: dict[str, object]
    reasons: tuple[Reason, ...]
    measured: Measured
    chosen: Chosen
    whole: Mapping[str, Point]

    @property
    def fraction(self) -> float:
        """Bytes of the quantized checkpoint over those of the source."""
        return self.chosen.nbytes / self.measured.nbytes


def recommend(
    measured: Measured,
    *,
    max_bytes: float | None = None,
    min_sqnr: float | None = None,
    objective: str = "absolute",
    granularity: str = "kind",
) -> Recommendation:
    """Return the request of least error within a size, or of least size above a signal-to-noise ratio.

    Args:
        measured: a checkpoint's units.
        max_bytes: bytes of the quantized checkpoint, as a fraction of the source's.
        min_sqnr: decibels that no layer may fall below. One of the two is given.
        objective: `relative`, `absolute` or `output`; see `quant_kernels.recommend.choose`.
        granularity: `kind` or `layer`.

    Raises:
        PlanError: an argument does not fit, or no choice fits it.
    """
    if (max_bytes is None) == (min_sqnr is None):
        message = "max_bytes, min_sqnr: give one of them"
        raise PlanError(message)
    goal = _word("objective", objective, OBJECTIVES)
    grain = _word("granularity", granularity, GRANULARITIES)
    if max_bytes is not None:
        if not 0 < max_bytes <= 1:
            message = f"max_bytes: found {shown(max_bytes)}; allowed: a fraction of the source's bytes, above 0 up to 1"
            raise PlanError(message)
        limit = int(max_bytes * measured.nbytes)
        chosen = choose_by_bytes(measured, limit, objective=goal, granularity=grain)
    else:
        assert min_sqnr is not None  # noqa: S101  (one of the two)
        if not math.isfinite(min_sqnr):
            message = f"min_sqnr: found {shown(min_sqnr)}; allowed: a finite number of decibels"
            raise PlanError(message)
        chosen = choose_by_sqnr(measured, min_sqnr, objective=goal)
    return Recommendation(
        request_of(measured, chosen),
        tuple(_reason(unit, chosen.options[unit.name], goal, min_sqnr) for unit in measured.units),
        measured,
        chosen,
        _whole(measured, goal),
    )


def by_kind(found: Recommendation) -> dict[tuple[str, str], list[Reason]]:
    """Return the reasons grouped by kind of layer (its template) and format."""
    groups: dict[tuple[str, str], list[Reason]] = defaultdict(list)
    for reason in found.reasons:
        groups[reason.unit.template, reason.option.format or "as it is"].append(reason)
    return dict(groups)


def _word(argument: str, value: str, allowed: Sequence[Word]) -> Word:
    for word in allowed:
        if word == value:
            return word
    near = nearest(value, allowed)
    hint = f"; did you mean {near!r}?" if near else ""
    message = f"{argument}: found {shown(value)}; allowed: {', '.join(allowed)}{hint}"
    raise PlanError(message)


def _reason(unit: Unit, option: Option, objective: Objective, bound: float | None) -> Reason:
    """Return why a unit has its option: what it has, and what the neighbours on either side would give."""
    own = f"{unit.sqnr_db(option):.1f} dB at {option.nbytes:,} bytes"
    smaller = [each for each in unit.options if each.nbytes < option.nbytes]
    if bound is not None:
        if not smaller:
            return Reason(unit, option, f"{own}: the smallest format keeps {bound:g} dB")
        best = max(smaller, key=unit.sqnr_db)
        return Reason(unit, option, f"{own}: {best.format} has {unit.sqnr_db(best):.1f} dB, below {bound:g}")
    cost = cost_function(objective)
    if smaller:
        best = min(smaller, key=lambda each: cost(unit, each))
        saved = (cost(unit, best) - cost(unit, option)) / (option.nbytes - best.nbytes)
        return Reason(unit, option, f"{own}: {saved:.3g} of error saved a byte over {best.format}, worth its bytes")
    larger = [each for each in unit.options if each.nbytes > option.nbytes]
    best = max(larger, key=lambda each: (cost(unit, option) - cost(unit, each)) / (each.nbytes - option.nbytes))
    saved = (cost(unit, option) - cost(unit, best)) / (best.nbytes - option.nbytes)
    word = best.format or "staying as it is"
    return Reason(unit, option, f"{own}: {word} would save {saved:.3g} of error a byte, less than others")


def _whole(measured: Measured, objective: Objective) -> dict[str, Point]:
    """Return the point of all units in one format, for each format that all of them can have."""
    cost = cost_function(objective)
    names = (
        [option.format for option in measured.units[0].options if option.format is not None] if measured.units else []
    )
    found = {}
    for name in names:
        if any(name not in {option.format for option in unit.options} for unit in measured.units):
            continue
        options = [(unit, unit.option(name)) for unit in measured.units]
        nbytes = measured.other_nbytes + sum(option.nbytes for _, option in options)
        found[name] = Point(nbytes, sum(cost(unit, option) for unit, option in options))
    return found
