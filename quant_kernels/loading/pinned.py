"""Pinned staging: tensors reach a CUDA device on a stream of its own while others are converted."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES: Final = 16 << 20
"""Bytes of one pinned buffer; larger tensors pass through in pieces."""
CHUNKS: Final = 12
"""Pinned buffers; as many copies are on their way at a time."""


class PinnedStager:
    """Copies tensors to a CUDA device through a few pinned buffers.

    One thread of its own copies into pinned memory, with all cores, and starts the transfers, so that those who load
    need not wait; tensors that are pinned already are transferred as they are. Conversions run on another stream, and
    wait on the device for the transfers that were started before them.
    """

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS) -> None:
        """Allocate the pinned buffers.

        Args:
            device: a CUDA device.
            chunk_bytes: bytes of each.
            chunks: how many.
        """
        self.device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
        self.gathers = True
        self._stream = torch.cuda.Stream(self.device)
        self._chunk_bytes = chunk_bytes
        self._free = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(chunks)]
        self._flying: list[tuple[torch.cuda.Event, Tensor]] = []
        self._kept: list[tuple[torch.cuda.Event, Tensor]] = []
        self._jobs: SimpleQueue[tuple[Tensor, Tensor] | None] = SimpleQueue()
        self._given = self._started = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True)
        self._thread.start()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for a whole weight, on the device."""
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def bring(self, tensor: Tensor, place: Tensor | None = None) -> Tensor:
        """Return the tensor on the device; its values are there for work that follows `before_conversion`.

        Args:
            tensor: anywhere; must not be changed before the conversion.
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
        source = _flat_bytes(tensor.contiguous())
        target = _flat_bytes(there)
        if source.is_pinned():
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                self._keep(source)
            return there
        with self._changed:
            self._given += 1
        self._jobs.put((source, target))
        return there

    def before_conversion(self) -> None:
        """Make the current stream wait for the transfer of everything that was brought.

        Raises:
            RuntimeError: a transfer failed.
        """
        with self._changed:
            given = self._given
            while self._started < given and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                message = f"a transfer to {self.device} failed: {self._failure}"
                raise RuntimeError(message) from self._failure
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def after_conversion(self) -> None:
        """Make transfers that are started from now on wait for the conversion: they may reuse its source's memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """End the thread, once it has started every transfer."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                if self._failure is None:
                    self._transfer(*job)
            except Exception as error:  # noqa: BLE001  (raised by before_conversion)
                self._failure = error
            del job
            with self._changed:
                self._started += 1
                self._changed.notify_all()

    def _transfer(self, source: Tensor, target: Tensor) -> None:
        for start in range(0, source.numel(), self._chunk_bytes):
            stop = min(start + self._chunk_bytes, source.numel())
            chunk = self._take()
            chunk[: stop - start].copy_(source[start:stop])
            with torch.cuda.stream(self._stream):
                target[start:stop].copy_(chunk[: stop - start], non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
            self._flying.append((event, chunk))

    def _take(self) -> Tensor:
        """Return a pinned buffer that no transfer uses; the oldest transfer ends first."""
        if self._free:
            return self._free.pop()
        event, chunk = self._flying.pop(0)
        event.synchronize()
        return chunk

    def _keep(self, tensor: Tensor) -> None:
        """Hold a pinned tensor of the caller until its transfer has ended."""
        event = torch.cuda.Event()
        event.record(self._stream)
        with self._changed:
            self._kept = [each for each in self._kept if not each[0].query()]
            self._kept.append((event, tensor))


def _flat_bytes(tensor: Tensor) -> Tensor:
    return (tensor.view(-1) if tensor.dim() else tensor.reshape(1)).view(torch.uint8)
