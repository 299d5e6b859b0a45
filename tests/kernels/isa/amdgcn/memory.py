"""Memory that kernels see: mapped regions with bounds, and a block's shared memory that starts poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from amdgcn.errors import MemoryFaultError, RaceError

Bytes = NDArray[np.uint8]
NOBODY, MANY = -1, -2
_ALL = slice(None)


@dataclass
class Region:
    """A mapped range of addresses."""

    name: str
    base: int
    data: Bytes
    writable: bool

    @property
    def end(self) -> int:
        """First address behind the region."""
        return self.base + len(self.data)


@dataclass
class Memory:
    """Regions far apart from each other: an access must lie inside one of them."""

    regions: list[Region] = field(default_factory=list)
    _next: int = 0x7F00_0000_0000

    def map(self, name: str, data: Bytes, *, writable: bool, offset: int = 0) -> int:
        """Map an array of bytes (not a copy) and return its address, a multiple of 4096 plus `offset`."""
        base = self._next + offset
        self.regions.append(Region(name, base, data, writable))
        self._next += (len(data) + offset + 0x200000) & ~0xFFF
        return base

    def _find(self, first: int, last: int, size: int, access: str) -> Region:
        for region in self.regions:
            if region.base <= first and last + size <= region.end:
                return region
        near = min(self.regions, key=lambda r: min(abs(first - r.base), abs(first - r.end)), default=None)
        where = f"; nearest is {near.name}, 0x{near.base:x} ... 0x{near.end:x}" if near else ""
        raise MemoryFaultError(f"{access} of {size} bytes at 0x{first:x} ... 0x{last:x} lies in no region{where}")

    def _spread(self, addresses: NDArray[np.uint64], size: int, access: str) -> tuple[Region, NDArray[np.int64]]:
        region = self._find(int(addresses.min()), int(addresses.max()), size, access)
        offsets = (addresses - np.uint64(region.base)).astype(np.int64)
        return region, offsets[:, None] + np.arange(size)

    def _groups(self, addresses: NDArray[np.uint64]) -> list[NDArray[np.int64] | slice]:
        """Return the lanes by region, for the few accesses whose lanes touch several."""
        first, last = int(addresses.min()), int(addresses.max())
        if any(region.base <= first and last < region.end for region in self.regions):
            return [_ALL]
        bases = np.array(sorted(region.base for region in self.regions), np.uint64)
        found = np.searchsorted(bases, addresses, side="right")
        return [np.flatnonzero(found == value) for value in np.unique(found)]

    def load(self, addresses: NDArray[np.uint64], size: int) -> Bytes:
        """Return `size` bytes at each address, [lanes, size]."""
        out = np.empty((len(addresses), size), np.uint8)
        for lanes in self._groups(addresses):
            region, index = self._spread(addresses[lanes], size, "load")
            out[lanes] = region.data[index]
        return out

    def store(self, addresses: NDArray[np.uint64], values: Bytes) -> None:
        """Write the bytes of each lane, [lanes, size]."""
        for lanes in self._groups(addresses):
            region, index = self._spread(addresses[lanes], values.shape[1], "store")
            if not region.writable:
                raise MemoryFaultError(f"store to {region.name}, which is read-only, at 0x{int(addresses[lanes][0]):x}")
            region.data[index] = values[lanes]

    def word(self, address: int, size: int) -> int:
        """Return `size` bytes at one address as an integer."""
        region = self._find(address, address, size, "load")
        start = address - region.base
        return int.from_bytes(region.data[start : start + size].tobytes(), "little")

    def set_word(self, address: int, value: int, size: int) -> None:
        """Write an integer of `size` bytes."""
        region = self._find(address, address, size, "store")
        if not region.writable:
            raise MemoryFaultError(f"store to {region.name}, which is read-only, at 0x{address:x}")
        start = address - region.base
        region.data[start : start + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)


class SharedMemory:
    """Shared memory of one block: starts with arbitrary bytes, remembers which wave touched what since a barrier."""

    def __init__(self, size: int, poison: np.random.Generator) -> None:
        self.data: Bytes = poison.integers(1, 255, size, np.uint8)
        self.detect_races = True
        self._writer = np.full(size, NOBODY)
        self._reader = np.full(size, NOBODY)

    def barrier(self) -> None:
        """Forget who touched what: every wave has arrived."""
        self._writer[:] = NOBODY
        self._reader[:] = NOBODY

    def _index(self, addresses: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
        if int(addresses.max()) + size > len(self.data):
            raise MemoryFaultError(
                f"shared memory: {size} bytes at {int(addresses.max())}, the block has {len(self.data)} bytes"
            )
        return addresses.astype(np.int64)[:, None] + np.arange(size)

    def _check(self, owners: NDArray[np.int64], index: NDArray[np.int64], wave: int, access: str) -> None:
        if not self.detect_races:
            return
        found = owners[index]
        other = (found != NOBODY) & (found != wave)
        if other.any():
            at = int(index[other][0])
            owner = int(found[other][0])
            who = "several waves" if owner == MANY else f"wave {owner}"
            raise RaceError(f"wave {wave} {access} shared byte {at}, touched by {who} since the last barrier")

    def load(self, addresses: NDArray[np.uint64], size: int, wave: int) -> Bytes:
        """Return `size` bytes at each address, [lanes, size]."""
        index = self._index(addresses, size)
        self._check(self._writer, index, wave, "reads")
        seen = self._reader[index]
        self._reader[index] = np.where((seen == NOBODY) | (seen == wave), wave, MANY)
        return self.data[index]

    def store(self, addresses: NDArray[np.uint64], values: Bytes, wave: int) -> None:
        """Write the bytes of each lane, [lanes, size]."""
        index = self._index(addresses, values.shape[1])
        self._check(self._writer, index, wave, "writes")
        self._check(self._reader, index, wave, "writes")
        self._writer[index] = wave
        self.data[index] = values
