"""Converts one layer after the other: agrees with other ranks, converts, and only then touches the module."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import attrs

from quant_kernels.checks import NonFiniteError
from quant_kernels.library import native_on
from quant_kernels.loading.install import install, mark
from quant_kernels.loading.modules import WeightSlot
from quant_kernels.loading.parallel import ShardPlace, agree, needs_agreement
from quant_kernels.loading.sources import StoredScales
from quant_kernels.loading.weights import ConversionOptions, WeightWork, convert_weights
from quant_kernels.targets import TARGETS
from quant_spec import LoadError, QuantSpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from quant_kernels.loading.decisions import LayerPlan
    from quant_kernels.loading.distributed import Ranks
    from quant_kernels.loading.modules import LayerView
    from quant_kernels.quantized import QuantizedTensor
    from quant_spec import QuantFormat


@attrs.frozen(eq=False)
class SlotWork:
    """A weight of a layer, ready to be converted.

    Attributes:
        slot: where the result goes.
        work: its values.
        place: where they lie in the whole weight.
        old: what lies beside it and describes it.
        source_nbytes: bytes of its values and scales.
        key: what it is known by when several slots hold it (tied weights).
    """

    slot: WeightSlot
    work: WeightWork
    place: ShardPlace
    old: StoredScales
    source_nbytes: int
    key: int


@attrs.frozen
class LayerRecord:
    """What converting one layer on this rank took and gave.

    Attributes:
        layer: its name.
        seconds: wall time.
        bytes_before: bytes of weights and scales in the source.
        bytes_after: bytes of codes and scales now.
        weights: matrices on this rank.
        kernel: `native` or `reference`.
        signal: Σ w², if it was asked for.
        noise: Σ (w − ŵ)², likewise.
    """

    layer: str
    seconds: float
    bytes_before: int
    bytes_after: int
    weights: int
    kernel: str
    signal: float = 0.0
    noise: float = 0.0


class LayerConverter:
    """Converts layers of one model; remembers what it did, and what went wrong."""

    def __init__(self, ranks: Ranks, options: ConversionOptions, total: int, tied: Collection[int] = ()) -> None:
        """Start with nothing done.

        Args:
            ranks: the group.
            options: of every conversion.
            total: how many layers there are to be converted, on this rank.
            tied: keys of weights that several slots hold: converted once.
        """
        self.records: list[LayerRecord] = []
        self.failure: Exception | None = None
        self.told_others = False
        self._ranks = ranks
        self._options = options
        self._total = total
        self._tied = tied
        self._shared: dict[int, QuantizedTensor] = {}

    def agrees(self, plan: LayerPlan) -> bool:
        """Tell whether converting a layer takes a collective."""
        target = target_of(plan)
        return plan.placement is not None and any(needs_agreement(target, each) for each in plan.placement.places)

    def convert(self, plan: LayerPlan, works: Sequence[SlotWork]) -> LayerRecord:
        """Convert a layer in place.

        Raises:
            NonFiniteError: checked, and a weight holds NaN or Inf; the layer is untouched.
            LoadError: anything else failed, here or on another rank; the layer is untouched.
        """
        target = target_of(plan)
        started = time.perf_counter()
        fresh = works if not self._tied else self._not_converted(works)
        try:
            agreed = self._agreed(plan, fresh, target)
        except Exception as error:
            self.failure, self.told_others = self._told(error, plan), True
            raise self.failure from error
        try:
            done = convert_weights(agreed, target, self._options)
        except Exception as error:
            self.failure = self._told(error, plan)
            raise self.failure from error
        made = {each.key: result for each, result in zip(fresh, done, strict=True)}
        self._shared.update({key: result for key, result in made.items() if key in self._tied})
        results = [made[each.key] if each.key in made else self._shared[each.key] for each in works]
        signal = noise = 0.0
        for result in results:
            if result.error_sums is not None:
                sums = result.error_sums.tolist()
                signal, noise = signal + sums[0], noise + sums[1]
        try:
            _install_all(plan, works, results)
        except BaseException:
            # Ctrl-C between two assignments: all of them once more, so that no layer is left half done.
            _install_all(plan, works, results)
            raise
        record = LayerRecord(
            plan.name,
            time.perf_counter() - started,
            sum(each.source_nbytes for each in works),
            sum(result.nbytes for result in done),
            plan.view.weights,
            "native" if target.name in TARGETS and native_on(works[0].work.device.type) else "reference",
            signal,
            noise,
        )
        self.records.append(record)
        return record

    def _not_converted(self, works: Sequence[SlotWork]) -> Sequence[SlotWork]:
        """Return the weights that no other slot has brought yet, each once."""
        return list({each.key: each for each in works if each.key not in self._shared}.values())

    def _agreed(self, plan: LayerPlan, works: Sequence[SlotWork], target: QuantFormat) -> list[WeightWork]:
        if self._ranks.size == 1:
            return [each.work for each in works]
        return agree(self._ranks, [(each.work, each.place) for each in works], target, self._options, layer=plan.name)

    def progress(self) -> str:
        """Return how many layers are done, in words."""
        return f"{len(self.records)} of {self._total} layers were quantized"

    def tell_others(self, plans: Sequence[LayerPlan], works: Sequence[Sequence[SlotWork]]) -> None:
        """After a failure that other ranks do not know of, take part in their next exchange to tell them.

        Args:
            plans: the layers that come after the failed one, in the common order.
            works: their weights.
        """
        if self._ranks.size == 1 or self.told_others:
            return
        self.told_others = True
        text = str(self.failure)
        for plan, each in zip(plans, works, strict=True):
            if self.agrees(plan):
                pairs = [(one.work, one.place) for one in each]
                with contextlib.suppress(LoadError):
                    agree(self._ranks, pairs, target_of(plan), self._options, layer=plan.name, failure=text)
                return
        self._ranks.gather((None, text), "telling the other ranks of a failure")

    def _told(self, error: Exception, plan: LayerPlan) -> Exception:
        """Return the error with what was done before it."""
        done = f"{self.progress()}; {plan.name} and the others are untouched"
        if isinstance(error, NonFiniteError):
            named = _named(error, plan.view)
            named.args = (f"{named}\n{done}",)
            return named
        if isinstance(error, QuantSpecError):
            return LoadError(f"{error}\n{done}")
        return LoadError(f"{plan.name}: {type(error).__name__}: {error}\n{done}")


def _install_all(plan: LayerPlan, works: Sequence[SlotWork], results: Sequence[QuantizedTensor]) -> None:
    """Put the results into the modules of a layer; doing it again changes nothing."""
    blocks = target_of(plan).name == "per_block_fp8"
    for each, result in zip(works, results, strict=True):
        install(each.slot, result, each.old, each.place.block_offset if blocks else (0, 0))
    mark(plan.view, plan.decision.config)


def target_of(plan: LayerPlan) -> QuantFormat:
    """Return the format that a changed layer is converted to."""
    assert plan.target is not None  # noqa: S101  (only changed layers come here)
    return plan.target


def _named(error: NonFiniteError, view: LayerView) -> NonFiniteError:
    """Return the error with the expert's global index and rows within it, for a stack."""
    slot = next((each for each in view.slots if each.name == error.name and len(each.shape) > 2), None)  # noqa: PLR2004
    if slot is None or not error.rows:
        return NonFiniteError(error.name, error.rows, error.count, "rows, groups or blocks")
    height = slot.shape[-2]
    expert = error.rows[0] // height
    rows = [row % height for row in error.rows if row // height == expert]
    name = f"{slot.name}: expert {view.expert_id(expert)}"
    return NonFiniteError(name, rows, error.count, "rows, groups or blocks of the stack")
