"""Staging: how many bytes of incomplete layers may be held, and how they reach the device while it converts others."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import torch

from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DEFAULT_STAGING_BYTES: Final = 4 << 30
"""Bytes of layers that wait, beside the one that has waited longest."""
PATIENCE: Final = 30.0
"""Seconds without any progress after which a full budget is an error, where several threads load."""
CHUNK_BYTES: Final = 16 << 20
"""Bytes of one pinned buffer; larger tensors pass through in pieces."""
CHUNKS: Final = 12
"""Pinned buffers; as many copies are on their way at a time."""


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

    def take(self, layer: str, nbytes: int, *, can_free: Callable[[], bool], stopped: Callable[[], bool]) -> None:
        """Count bytes of a layer; wait while they are too many and a conversion that will free some is due.

        Args:
            layer: its name.
            nbytes: bytes that it is about to hold more.
            can_free: tells whether a complete layer is being converted or waits for it.
            stopped: tells whether the job has failed: then nobody waits.

        Raises:
            LoadError: they are too many and nothing will free any.
        """
        with self._changed:
            self._threads.add(threading.get_ident())
            deadline = time.monotonic() + (self._patience if len(self._threads) > 1 else 0.0)
            while self._exceeds(layer, nbytes) and not stopped():
                # What frees bytes does so before it stops being busy: look again before giving up.
                frees = bool(self._landing) or can_free() or not self._exceeds(layer, nbytes)
                if frees:
                    deadline = max(deadline, time.monotonic() + self._patience * (len(self._threads) > 1))
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


class PinnedStager:
    """Copies tensors to a CUDA device through a few pinned buffers, on a stream of its own.

    Loader threads copy into pinned memory and start the transfers; conversions run on another stream meanwhile, and
    wait on the device for the transfers that were started before them.
    """

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS) -> None:
        """Allocate the pinned buffers.

        Args:
            device: a CUDA device.
            chunk_bytes: bytes of each.
            chunks: how many.
        """
        self.device = device
        self.gathers = True
        self._stream = torch.cuda.Stream(device)
        self._chunk_bytes = chunk_bytes
        self._free = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(chunks)]
        self._flying: list[tuple[torch.cuda.Event, Tensor]] = []
        self._kept: list[tuple[torch.cuda.Event, Tensor]] = []
        self._available = threading.Condition()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a whole weight, on the device."""
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def bring(self, tensor: Tensor, place: Tensor | None = None) -> Tensor:
        """Return the tensor on the device; its values are there for work that follows `before_conversion`.

        Args:
            tensor: anywhere.
            place: contiguous memory on the device to copy it into; None: it gets memory of its own.
        """
        if tensor.device.type == "cuda":
            # It may have been made on any stream of the caller's: order the transfers after that one.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            if place is None:
                return tensor.to(self.device)
            with torch.cuda.stream(self._stream):
                return place.copy_(tensor, non_blocking=True)
        there = self.allocate(tuple(tensor.shape), tensor.dtype) if place is None else place
        source = tensor.contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
        target = there.view(-1).view(torch.uint8) if there.dim() else there.reshape(1).view(torch.uint8)
        if tensor.is_pinned():
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                self._keep(tensor)
            return there
        for start in range(0, source.numel(), self._chunk_bytes):
            stop = min(start + self._chunk_bytes, source.numel())
            chunk = self._take()
            chunk[: stop - start].copy_(source[start:stop])
            with torch.cuda.stream(self._stream):
                target[start:stop].copy_(chunk[: stop - start], non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            with self._available:
                self._flying.append((event, chunk))
                self._available.notify()
        return there

    def before_conversion(self) -> None:
        """Make the current stream wait for every transfer that was started."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def after_conversion(self) -> None:
        """Make transfers that are started from now on wait for the conversion: they may reuse its source's memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _keep(self, tensor: Tensor) -> None:
        """Hold a pinned tensor of the caller until its transfer has ended."""
        event = torch.cuda.Event()
        event.record(self._stream)
        with self._available:
            self._kept = [each for each in self._kept if not each[0].query()]
            self._kept.append((event, tensor))

    def _take(self) -> Tensor:
        """Return a pinned buffer that no transfer uses."""
        while True:
            with self._available:
                if self._free:
                    return self._free.pop()
                while not self._flying:
                    self._available.wait()
                event, chunk = self._flying.pop(0)
            event.synchronize()
            return chunk


def new_stager(device: torch.device) -> HostStager | PinnedStager:
    """Return what brings tensors to a device."""
    return PinnedStager(device) if device.type == "cuda" else HostStager(device)
