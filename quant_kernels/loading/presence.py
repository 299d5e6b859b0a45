"""Presence: which ranks have come to an exchange, so that an exchange that fails can say who is missing.

Backends report a dead or late peer as a broken connection or a timeout, without its rank. So every rank notes in the
group's store, before each exchange, that it has come to it; after a failure the notes tell who has not. Ranks on the
same host are also looked up among its processes, which tells a process that has ended from one that is late.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE: Final = 5.0
"""Seconds to wait, after a failure, for ranks that are merely later than the one that saw it."""
_POLL: Final = 0.02
_ALL_ARE_KNOWN: Final = 2
_counts: dict[str, int] = {}
"""Group name -> presences made for it so far: all ranks make them in the same order."""


class Presence:
    """This rank's notes in the store of its group, and what those of the others say."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Note where this process runs.

        Args:
            group: the group; its store is used.
            rank: this rank in it.
            size: number of ranks.
        """
        self._rank, self._size = rank, size
        self._store = _store_of(group)
        name = group.group_name
        count = _counts[name] = _counts.get(name, 0) + 1
        self._prefix = f"quant_kernels/{name}/{count}"
        self._at = 0
        self._host = _host()
        self._peers: dict[int, tuple[str, str]] = {}
        self._write("who", f"{os.getpid()} {self._host}")

    def arrive(self) -> None:
        """Note that this rank comes to its next exchange."""
        self._at += 1
        self._write("at", str(self._at))
        if self._at == _ALL_ARE_KNOWN:
            # The store may end with a rank: who the others are is asked while all are there.
            self._peers = {rank: who for rank in self._others() if (who := self._who(rank))[0]}

    def absent(self, patience: float = PATIENCE) -> str:
        """Return, in words, the ranks that have not come to this rank's exchange.

        A rank that came and ended afterwards has most likely raised the same error; it is named if there is no other.

        Args:
            patience: seconds to wait for ranks that are merely late: their process lives, or cannot be seen from here.
        """
        deadline = time.monotonic() + patience
        while True:
            missing = [rank for rank in self._others() if not self._has_come(rank)]
            ended = [rank for rank in missing if self._has_ended(rank)]
            if ended or not missing or time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        ended = ended or [rank for rank in self._others() if not missing and self._has_ended(rank)]
        gone = [f"rank {rank} (its process {self._who(rank)[0]} has ended)" for rank in ended]
        return _listed(gone or [f"rank {rank}" for rank in missing]) or "another rank"

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._size) if rank != self._rank)

    def _has_come(self, rank: int) -> bool:
        said = self._read("at", rank)
        return said.isdecimal() and int(said) >= self._at

    def _has_ended(self, rank: int) -> bool:
        pid, host = self._who(rank)
        return bool(pid) and host == self._host and not _is_alive(int(pid))

    def _who(self, rank: int) -> tuple[str, str]:
        if rank in self._peers:
            return self._peers[rank]
        pid, _, host = self._read("who", rank).partition(" ")
        return pid, host

    def _write(self, what: str, value: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone: the exchange will fail by itself
                self._store.set(f"{self._prefix}/{what}/{self._rank}", value)

    def _read(self, what: str, rank: int) -> str:
        key = f"{self._prefix}/{what}/{rank}"
        if self._store is None:
            return ""
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return bytes(self._store.get(key)).decode()
        return ""


class _Store(Protocol):
    """What is asked of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def _store_of(group: dist.ProcessGroup) -> _Store | None:
    """Return the store of a group; None: this torch does not say."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None:
        return None
    with contextlib.suppress(KeyError):
        found: _Store = find(group)
        return found
    return None


def _host() -> str:
    """Return what only processes that see each other's numbers have in common."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        # A process that has ended stays listed, as Z, until its parent asks for it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
