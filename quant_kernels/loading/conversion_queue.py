"""The one thread that converts layers: those whose ranks must agree in the common order, the others as they come."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from quant_kernels.loading.layer import LayerConverter, SlotWork
from quant_kernels.loading.parallel import ShardPlace
from quant_kernels.loading.sources import Part, StoredScales
from quant_kernels.loading.weights import WeightWork
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quant_kernels.loading.decisions import LayerPlan
    from quant_kernels.loading.staging import Budget, Stager


class ConversionQueue:
    """Complete layers wait here for their conversion."""

    def __init__(
        self,
        converter: LayerConverter,
        ordered: Sequence[LayerPlan],
        stager: Stager,
        budget: Budget,
        device: torch.device,
    ) -> None:
        """Start the thread.

        Args:
            converter: converts one layer.
            ordered: layers that take a collective, in the order common to all ranks.
            stager: brought the tensors to the device.
            budget: gets the bytes of converted layers back.
            device: where the model lives.
        """
        self.seconds = 0.0
        self._converter = converter
        self._ordered = list(ordered)
        self._agreeing = {plan.name for plan in ordered}
        self._stager, self._budget, self._device = stager, budget, device
        self._ready: dict[str, tuple[LayerPlan, list[SlotWork], Callable[[], None]]] = {}
        self._running = False
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="quantizer", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True after a failure."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what a conversion raised.

        Raises:
            LoadError: one failed.
        """
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Convert nothing more: every later call raises the error, or an earlier one."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def is_busy(self) -> bool:
        """Tell whether a conversion runs or could start."""
        with self._changed:
            return self._failure is None and (self._running or self._next() is not None)

    def put(self, plan: LayerPlan, works: list[SlotWork], release: Callable[[], None] = lambda: None) -> None:
        """Take a complete layer.

        Args:
            plan: the layer.
            works: its weights.
            release: called when it is converted and its source is no longer held.

        Raises:
            LoadError: an earlier conversion failed.
        """
        with self._changed:
            self.raise_failure()
            self._ready[plan.name] = (plan, works, release)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until every layer that can be converted is.

        Raises:
            LoadError: a conversion failed.
        """
        with self._changed:
            while self._failure is None and (self._running or self._next() is not None):
                self._changed.wait()
            self.raise_failure()

    def close(self) -> None:
        """Convert what is left and end the thread.

        Raises:
            LoadError: a conversion failed.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._stager.close()
        self.raise_failure()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stop(self, error: BaseException) -> None:
        """End the thread after an error elsewhere; other ranks learn of it in their next exchange."""
        self.fail(error)
        with self._changed:
            self._ready.clear()
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._stager.close()
        if self._converter.failure is None:
            self._converter.failure = error if isinstance(error, Exception) else LoadError(type(error).__name__)
        if isinstance(error, Exception):
            self._tell_others()

    def _next(self) -> str | None:
        if self._ordered and self._ordered[0].name in self._ready:
            return self._ordered[0].name
        return next((name for name in self._ready if name not in self._agreeing), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._failure is None and self._next() is None and not self._closed:
                    self._changed.wait()
                name = None if self._failure is not None else self._next()
                if name is None:
                    self._changed.notify_all()
                    return
                plan, works, release = self._ready.pop(name)
                self._running = True
            failure: BaseException | None = None
            try:
                self._convert(plan, works)
            except BaseException as error:  # noqa: BLE001  (raised by the next call from outside)
                failure = error
            works.clear()
            release()
            del works, release
            with self._changed:
                self._running = False
                self._failure = self._failure or failure
                if self._ordered and self._ordered[0].name == name:
                    del self._ordered[0]
                self._changed.notify_all()

    def _convert(self, plan: LayerPlan, works: list[SlotWork]) -> None:
        started = time.perf_counter()
        self._stager.before_conversion()
        self._converter.convert(plan, works)
        self._stager.after_conversion()
        self.seconds += time.perf_counter() - started

    def _tell_others(self) -> None:
        left = self._ordered[:1]
        self._converter.tell_others(left, [_shapes_alone(plan, self._device) for plan in left])


def _shapes_alone(plan: LayerPlan, device: torch.device) -> list[SlotWork]:
    """Return a layer's weights without values, to take part in its exchange after a failure."""
    places = plan.placement.places if plan.placement else (ShardPlace(),) * len(plan.view.slots)
    found = []
    for slot, place in zip(plan.view.slots, places, strict=True):
        nothing = Part(torch.empty((0, 0), device=device), slot.name)
        work = WeightWork(slot.name, slot.shape, (nothing,))
        found.append(SlotWork(slot, work, place, StoredScales(), 0, id(slot)))
    return found
