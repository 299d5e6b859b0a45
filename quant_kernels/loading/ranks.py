"""Several processes, on one host or many, that write one checkpoint: each its own shards, on a file system they share.

They meet in `OUTPUT.partial/ranks`, one file for each, rewritten once a second: how far the process is, and that it is
alive. Nothing else is needed: no port, no collective library. Every process watches all others; one that fails, or is
not heard of for a time, is an error in all of them. What they wrote stays, and the same job takes it up with any number
of processes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.loading.files import read_json
from quant_spec import LoadError, PlanError
from quant_spec.errors import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from quant_kernels.loading.shard_layout import ShardLayout

FOLDER: Final = "ranks"
TIMEOUT: Final = 120.0
"""Seconds after which a process that is not heard of counts as dead."""
_BEAT: Final = 1.0
_POLL: Final = 0.05
_AGAIN: Final = 0.5
JOINED, WRITTEN, COLLECTED, COMPLETE = 1, 2, 3, 4
"""How far a process is: it knows the others; its shards are complete; it has read what is known of all; all is done."""


@attrs.frozen
class Ranks:
    """This process among those that write a checkpoint.

    Attributes:
        rank: its number, from 0; 0 finishes the checkpoint.
        world: how many there are.
        timeout: seconds after which one that is not heard of counts as dead.
    """

    rank: int = 0
    world: int = 1
    timeout: float = TIMEOUT

    def __attrs_post_init__(self) -> None:
        """Refuse what is no place among processes.

        Raises:
            PlanError: it is none.
        """
        if type(self.rank) is not int or type(self.world) is not int or not 0 <= self.rank < self.world:
            message = f"ranks: found rank {shown(self.rank)} of {shown(self.world)}; allowed: 0 <= rank < world"
            raise PlanError(message)
        if type(self.timeout) not in {int, float} or not self.timeout > 0:
            message = f"ranks: found a timeout of {shown(self.timeout)}; allowed: seconds above 0"
            raise PlanError(message)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, *, timeout: float = TIMEOUT) -> Ranks:
        """Return the place that `torchrun` gave this process; alone without it.

        RANK and WORLD_SIZE count only beside TORCHELASTIC_RUN_ID, which torchrun sets: other tools leave them behind.

        Raises:
            PlanError: they are no numbers.
        """
        given = os.environ if environment is None else environment
        if "TORCHELASTIC_RUN_ID" not in given:
            return cls(timeout=timeout)
        return cls.parse(f"{given.get('RANK', '')}/{given.get('WORLD_SIZE', '')}", timeout=timeout)

    @classmethod
    def parse(cls, text: str, *, timeout: float = TIMEOUT) -> Ranks:
        """Return the place that `RANK/WORLD` says.

        Raises:
            PlanError: it says none.
        """
        rank, _, world = text.partition("/")
        if not (rank.isascii() and rank.isdigit() and world.isascii() and world.isdigit()) or len(text) > 20:  # noqa: PLR2004
            message = f"ranks: found {shown(text)}; allowed: RANK/WORLD, as 0/2 and 1/2"
            raise PlanError(message)
        return cls(int(rank), int(world), timeout)

    @property
    def leads(self) -> bool:
        """This process makes the folder and finishes it."""
        return self.rank == 0

    def share(self, layouts: Sequence[ShardLayout]) -> frozenset[str]:
        """Return the shards of this process: the largest first, each to the one that has the fewest bytes."""
        loads = [0] * self.world
        mine = []
        for layout in sorted(layouts, key=lambda each: (-each.nbytes, each.file)):
            owner = loads.index(min(loads))
            loads[owner] += layout.nbytes
            if owner == self.rank:
                mine.append(layout.file)
        return frozenset(mine)


class Meeting:
    """What this process says of itself and hears of the others."""

    def __init__(self, ranks: Ranks, partial: Path, fingerprint: str) -> None:
        """Take the place, the partial folder, and the digest of the job, which must be that of all."""
        self.ranks = ranks
        self._folder = partial / FOLDER
        self._said: dict[str, object] = {"id": uuid.uuid4().hex, "fingerprint": fingerprint, "phase": 0, "beat": 0}
        self._lock = threading.Lock()
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="quantize-ranks", daemon=True)
        self._heard: dict[int, tuple[object, float]] = {}
        self._members: dict[int, str] = {}
        self._looked = 0.0

    def enter(self) -> None:
        """Wait until all processes are there and do the same job.

        Raises:
            LoadError: one does not come in time, or does another job.
        """
        self._await_folder()
        self._thread.start()
        try:
            self._meet()
        except BaseException as error:
            if not self.ranks.leads:
                self.fail(error, keep=True)
                self.leave()
            raise

    def leave(self) -> None:
        """Fall silent."""
        self._silent.set()
        if self._thread.is_alive():
            self._thread.join()

    def _await_folder(self) -> None:
        if self.ranks.leads:
            self._folder.mkdir(exist_ok=True)
            for each in self._folder.iterdir():
                each.unlink(missing_ok=True)
            return
        until = time.monotonic() + self.ranks.timeout
        while not self._folder.is_dir():
            if time.monotonic() > until:
                message = f"{self._folder.parent}: rank 0 has not made it within {self.ranks.timeout:g} s"
                raise LoadError(message)
            time.sleep(_POLL)

    def _meet(self) -> None:
        until = time.monotonic() + self.ranks.timeout
        again = 0.0
        while True:
            present = {rank: said for rank in self._others() if (said := self._read(rank)) is not None}
            if self.ranks.leads:
                if len(present) == self.ranks.world - 1:
                    self._admit(present)
                    return
            elif 0 in present and self._is_admitted(present[0]):
                return
            if time.monotonic() > until:
                missing = [str(rank) for rank in self._others() if rank not in present] or ["0"]
                message = (
                    f"ranks {', '.join(missing)} of {self.ranks.world} have not come within {self.ranks.timeout:g} s"
                )
                raise LoadError(message)
            time.sleep(_POLL)
            if time.monotonic() > again:
                # The leader may have emptied the folder after we had said that we are here.
                self._say({})
                again = time.monotonic() + _AGAIN

    def _admit(self, present: Mapping[int, Mapping[str, object]]) -> None:
        self._members = {rank: str(said["id"]) for rank, said in present.items()}
        for rank, said in present.items():
            if said.get("fingerprint") != self._said["fingerprint"]:
                message = f"rank {rank} does another job: its request, options or source files differ from rank 0's"
                raise LoadError(message)
        members = {str(rank): name for rank, name in self._members.items()}
        self._say({"phase": JOINED, "members": members})

    def _is_admitted(self, leader: Mapping[str, object]) -> bool:
        if "failed" in leader:
            message = f"rank 0: {leader['failed']}"
            raise LoadError(message)
        members = leader.get("members")
        if not isinstance(members, dict) or members.get(str(self.ranks.rank)) != self._said["id"]:
            return False
        self._members = {int(rank): str(name) for rank, name in members.items()} | {0: str(leader["id"])}
        del self._members[self.ranks.rank]
        self._say({"phase": JOINED})
        return True

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def _read(self, rank: int) -> dict[str, object] | None:
        said = read_json(self._path(rank))
        return said if isinstance(said, dict) and "id" in said else None

    def _say(self, more: Mapping[str, object]) -> None:
        with self._lock:
            self._said = {**self._said, **more, "beat": int(str(self._said["beat"])) + 1}
            scratch = self._folder / f"{self.ranks.rank}.new"
            # A beat that cannot be written is one that is not heard: that is how the others learn of it.
            try:
                scratch.write_text(json.dumps(self._said), "utf-8")
                scratch.replace(self._path(self.ranks.rank))
            except OSError:
                return

    def _beat(self) -> None:
        while not self._silent.wait(min(_BEAT, self.ranks.timeout / 5)):
            self._say({})

    def fail(self, error: BaseException, *, keep: bool) -> None:
        """Tell the others that this process gives up, and whether what was written is worth keeping."""
        text = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
        self._say({"failed": text, "keep": keep, "relayed": isinstance(error, PeerError)})

    def look(self) -> None:
        """Look after the others, at most once a second.

        Raises:
            PeerError: one has failed or is not heard of.
        """
        now = time.monotonic()
        if now - self._looked >= min(_BEAT, self.ranks.timeout / 5):
            self._looked = now
            for rank in self._members:
                self._phase_of(rank)

    def reach(self, phase: int) -> None:
        """Say how far this process is, and wait until all have come as far.

        Raises:
            PeerError: one has failed or is not heard of.
        """
        self._say({"phase": phase})
        self.wait_for(phase, list(self._members))

    def say(self, phase: int) -> None:
        """Say how far this process is."""
        self._say({"phase": phase})

    def wait_for(self, phase: int, ranks: Sequence[int], *, gone_is_done: bool = False) -> None:
        """Wait until some processes have come as far as `phase`.

        Args:
            phase: how far.
            ranks: which.
            gone_is_done: the whole folder may have been removed, which the leader does at the end.

        Raises:
            PeerError: one has failed or is not heard of.
        """
        for rank in ranks:
            while self._phase_of(rank) < phase:
                if gone_is_done and not self._folder.exists():
                    return
                time.sleep(_POLL)
                self.look()

    def wait_for_silence(self) -> None:
        """Wait until no other process can be writing: each has given up, or was not heard of for the time."""
        for rank in self._members:
            with suppress(PeerError):
                while True:
                    self._phase_of(rank)
                    time.sleep(_POLL)

    def _phase_of(self, rank: int) -> int:
        said = self._read(rank)
        now = time.monotonic()
        beat = None if said is None or said["id"] != self._members[rank] else said["beat"]
        last, since = self._heard.get(rank, (None, now))
        if beat is None or beat == last:
            beat = last
        else:
            since = now
        self._heard[rank] = (beat, since)
        phase = said.get("phase") if said is not None else 0
        if said is not None and said["id"] == self._members[rank] and "failed" in said and phase != COMPLETE:
            message = str(said["failed"]) if said.get("relayed") else f"rank {rank}: {said['failed']}"
            raise PeerError(message, keep=bool(said.get("keep")))
        if now - since > self.ranks.timeout:
            message = f"rank {rank} has not been heard of for {self.ranks.timeout:g} s: it was stopped, or its host was"
            raise PeerError(message, keep=True)
        return phase if isinstance(phase, int) else 0


class PeerError(LoadError):
    """Another process has failed.

    Attributes:
        keep: what was written is worth keeping.
    """

    def __init__(self, message: str, *, keep: bool) -> None:
        """Take the message and whether what was written is worth keeping."""
        super().__init__(message)
        self.keep = keep
