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
from weightsync.errors import ConfigurationError
from weightsync.topology import RankId

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


@dataclass(frozen=True)
class Housemate:
    """One worker's entry in the combined metadata list."""

    engine: str
    bucket_size: int
    process: str
    host: str
    pid: int
    token: str
    control: dict[str, Any]
    """The card of its control hub, where policy ranks keep in step."""

    @classmethod
    def describe(cls, engine: str, bucket_size: int, token: str, control: dict[str, Any]) -> Housemate:
        """Describe a worker of this process."""
        where = {"process": this_process(), "host": socket.gethostname(), "pid": os.getpid()}
        return cls(engine=engine, bucket_size=bucket_size, token=token, control=control, **where)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for any RPC layer."""
        return {name: getattr(self, name) for name in _TYPES}

    def card(self, name: str) -> dict[str, Any]:
        """Return the control card under the name that error texts are to show."""
        return {**self.control, "name": name}

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


_TYPES: dict[str, type] = {
    "engine": str,
    "bucket_size": int,
    "process": str,
    "host": str,
    "pid": int,
    "token": str,
    "control": dict,
}


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
    train, rollout = worlds
    if not 0 <= who.rank < (train if who.side == "policy" else rollout):
        raise ConfigurationError(f"{who} is outside its world")
    own_index = who.rank if who.side == "policy" else train + who.rank
    if not isinstance(metadata, list | tuple) or len(metadata) != train + rollout:
        count = len(metadata) if isinstance(metadata, list | tuple) else repr(metadata)[:80]
        raise ConfigurationError(
            f"metadata must hold one entry for each worker, policy ranks first: "
            f"expected {train + rollout}, got {count}"
        )
    entries = [_entry(index, data, own) for index, data in enumerate(metadata)]
    if entries[own_index] != own:
        raise ConfigurationError(
            f"metadata entry {own_index} is not what this worker's last prepare() returned: "
            f"the list is out of order, or older than that call"
        )
    return entries


def _entry(index: int, data: Any, own: Housemate) -> Housemate:
    if not isinstance(data, dict) or data.get("engine") != own.engine:
        raise ConfigurationError(f"metadata entry {index} was not made by a {own.engine} engine")
    for name, kind in _TYPES.items():
        if not isinstance(data.get(name), kind):
            raise ConfigurationError(f"metadata entry {index} has no proper {name!r}: {data.get(name)!r:.80}")
    entry = Housemate(**{name: data[name] for name in _TYPES})
    if entry.bucket_size != own.bucket_size:
        raise ConfigurationError(
            f"metadata entry {index} has bucket_size {entry.bucket_size}, this worker {own.bucket_size}: "
            f"all workers need the same bucket_size"
        )
    return entry
