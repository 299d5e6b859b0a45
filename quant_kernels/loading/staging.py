"""Staging: how many bytes of incomplete layers may be held, and how they reach the device while it converts others."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from quant_kernels.loading.pinned import PinnedStager
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Bytes of layers that wait, beside the one that has waited longest."""
PATIENCE: Final = 30.0
"""Seconds without any progress after which a full budget is an error, where several threads load."""


class Budget:
    """Counts the bytes that are held; those who bring more wait until conversions free some.

    The layer that has waited longest does not count: whatever the limit, it can be completed.
    """

    def __init__(self, limit: int, *, patience: float = PATIENCE) -> None:
        """Start with nothing held.

        Args:
            limit: bytes of all layers but the one that has waited longest.
            patience: seconds that a loader thread waits for what other threads may bring.
        """
        self.limit = limit
        self._patience = patience
        self._threads: set[int] = set()
        self.peak = 0
        self._landing = 0
        self._held: dict[str, int] = {}
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return sum(self._held.values())

    def take(
        self,
        layer: str,
        nbytes: int,
        *,
        can_free: Callable[[], bool],
        stopped: Callable[[], bool],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Count bytes of a layer; wait while they are too many and a conversion that will free some is due.

        Args:
            layer: its name.
            nbytes: bytes that it is about to hold more.
            can_free: tells whether a complete layer is being converted or waits for it.
            stopped: tells whether the job has failed: then nobody waits.
            ready: tells whether memory that another thread takes the bytes for is there.

        Raises:
            LoadError: they are too many and nothing will free any.
        """
        with self._changed:
            self._threads.add(threading.get_ident())
            several = len(self._threads) > 1 or not ready()
            deadline = time.monotonic() + (self._patience if several else 0.0)
            while (self._exceeds(layer, nbytes) or not ready()) and not stopped():
                # What frees bytes does so before it stops being busy: look again before giving up.
                frees = bool(self._landing) or can_free() or (ready() and not self._exceeds(layer, nbytes))
                if frees:
                    deadline = max(deadline, time.monotonic() + self._patience * several)
                elif time.monotonic() >= deadline:
                    raise LoadError(self._overflow(layer, nbytes))
                self._changed.wait(0.05)
            self._landing += 1
            self._held[layer] = self._held.get(layer, 0) + nbytes
            self.peak = max(self.peak, self.held)

    def landed(self) -> None:
        """Say that bytes that were taken are where they belong: whether they completed a layer can be told now."""
        with self._changed:
            self._landing -= 1
            self._changed.notify_all()

    def free(self, layer: str) -> None:
        """Forget the bytes of a layer."""
        with self._changed:
            self._held.pop(layer, None)
            self._changed.notify_all()

    def _exceeds(self, layer: str, nbytes: int) -> bool:
        first = next(iter(self._held), layer)
        if layer == first:
            return False
        return self.held - self._held[first] + nbytes > self.limit

    def _overflow(self, layer: str, nbytes: int) -> str:
        largest = sorted(self._held.items(), key=lambda pair: -pair[1])[:4]
        listed = ", ".join(f"{name} ({held:,} bytes)" for name, held in largest)
        return (
            f"{layer}: staging budget of {self.limit:,} bytes exceeded by its tensor of {nbytes:,} bytes:"
            f" {len(self._held)} layers wait for more tensors or for their turn: {listed}; load the tensors of a layer"
            " together, or raise staging_bytes"
        )


class HostStager:
    """Weights stay in host memory: nothing is copied, unless pieces of a weight are to be gathered."""

    def __init__(self, device: torch.device, *, gathers: bool = False) -> None:
        """Take the device on which the model lives.

        Args:
            device: usually the host.
            gathers: True to copy the pieces of a weight into one buffer.
        """
        self.device = device
        self.gathers = gathers

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a whole weight."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def bring(self, tensor: Tensor, place: Tensor | None = None) -> Tensor:
        """Return the tensor on the device, in `place` if that is given."""
        return tensor.to(self.device) if place is None else place.copy_(tensor)

    def before_conversion(self) -> None:
        """Wait for nothing."""

    def after_conversion(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Have nothing to end."""


Stager: TypeAlias = HostStager | PinnedStager


def new_stager(device: torch.device) -> Stager:
    """Return what brings tensors to a device."""
    return PinnedStager(device) if device.type == "cuda" else HostStager(device)
