"""How the engines of one process find each other: what they say in `prepare`, and a registry."""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

from weightsync.engines.handover import Handover
from weightsync.engines.metadata import Entry, read_metadata
from weightsync.errors import ConfigurationError
from weightsync.topology import RankId, make_topology

_born = uuid.uuid4().hex
_handovers: weakref.WeakValueDictionary[str, Handover] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def this_process() -> str:
    """Return what no other process on any host calls itself; a forked one has another number."""
    return f"{_born}-{os.getpid()}"


def publish(handover: Handover) -> str:
    """Make a meeting place known in this process, for as long as somebody holds it; returns its token."""
    token = uuid.uuid4().hex
    with _lock:
        _handovers[token] = handover
    return token


@dataclass(frozen=True, kw_only=True)
class Housemate(Entry):
    """One worker's entry in the combined metadata list. At its control channel policy ranks keep in step."""

    process: str
    host: str
    pid: int
    token: str

    @classmethod
    def describe(cls, engine: str, bucket_size: int, token: str, control: dict[str, Any]) -> Housemate:
        """Describe a worker of this process."""
        where = {"process": this_process(), "host": socket.gethostname(), "pid": os.getpid()}
        return cls(engine=engine, bucket_size=bucket_size, token=token, control=control, **where)  # type: ignore[arg-type]

    def handover(self, who: RankId) -> Handover:
        """Return the meeting place of this worker, which is ``who``.

        Raises:
            ConfigurationError: it is in another process, or its engine has been prepared again or is gone.
        """
        self.require_here(who)
        with _lock:
            found = _handovers.get(self.token)
        if found is None:
            raise ConfigurationError(
                f"the engine of {who} is gone or has been prepared again: prepare both sides, then connect"
            )
        return found

    def require_here(self, who: RankId) -> None:
        """Check that this worker, which is ``who``, is in this process.

        Raises:
            ConfigurationError: it is not.
        """
        if self.process != this_process():
            raise ConfigurationError(
                f"{who} is in another process (pid {self.pid} on {self.host}; this is pid {os.getpid()} on "
                f"{socket.gethostname()}), and without a refit_transport weights are handed over within one "
                f"process: write refit_transport: ipc for processes of one host, or nixl"
            )


def read_housemates(
    metadata: list[Any], *, own: Housemate, who: RankId, worlds: tuple[int, int]
) -> list[Housemate]:
    """Check the combined metadata list of a process group; policy ranks come first.

    Args:
        metadata: one entry a worker.
        own: what the last `prepare` of this worker said.
        who: this worker.
        worlds: the numbers of policy and of rollout workers.

    Raises:
        ConfigurationError: entries are missing, malformed, of another engine or bucket size, or of an earlier
            `prepare` of this worker; or this worker's rank is outside its world.
    """
    topology = make_topology("pairs", train_world_size=worlds[0], rollout_world_size=worlds[1])
    topology.require_rank(who)
    return read_metadata(metadata, expected=sum(worlds), own_index=topology.index(who), own=own)
