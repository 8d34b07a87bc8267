"""Faults in one worker process: armed from outside, they strike at a place of the next refit.

The places are reached from the drill's own worker classes, and from wrappers that are put around the sending
of control messages, the publishing of buckets and their fetching: in the worker process of a drill, and
nowhere else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from weightsync.control import Bucket, Link, Release
from weightsync.control.wires import ClientWire, ServerWire
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.inlet import Inlet
from weightsync.engines.outlet import Outlet

DELAY_S = 0.5
RAISED = "the drill's own fault"
BUCKET_PHASES = ("first", "middle", "last")
_DEATH_S = 5.0


class Order(msgspec.Struct):
    """A fault to come."""

    fault: str
    """``kill``, ``stop``, ``raise``, ``delay``, ``drop`` or ``corrupt``."""
    phase: str
    """Where: ``connect``, ``first``, ``middle``, ``last``, ``commit`` or ``finalize``."""
    pid: int = 0
    """The process that it strikes, if that is not the worker's own."""
    kind: str = ""
    """What is dropped or corrupted at a bucket: ``bucket``, ``release``, ``publish`` or ``fetch``."""


class InjectedError(RuntimeError):
    """What ``raise`` raises."""


class Faults:
    """The armed fault of this process, and where the running refit is."""

    def __init__(self) -> None:
        self.struck = False
        self._order: Order | None = None
        self._began = False
        """Whether a refit has begun since the order was given."""
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._frame = ""
        self._lock = threading.Lock()

    def arm(self, order: Order | None) -> None:
        """Let a fault come, instead of any other."""
        with self._lock:
            self._order, self.struck, self._frame, self._began = order, False, "", False

    def begin(self) -> None:
        """A refit begins here."""
        with self._lock:
            self._counts.clear()
            self._began = True

    def connect(self) -> None:
        """A refit begins here, and its peers are met next.

        Raises:
            InjectedError: that is the fault.
        """
        self.begin()
        if fault := self.reach("connect"):
            self.damage_next_frame(fault)

    def complete(self) -> None:
        """It has ended well: the next one has as many buckets."""
        with self._lock:
            self._totals = Counter(self._counts)

    def reach(self, phase: str) -> str:
        """Strike, if the fault is for here; returns ``drop`` or ``corrupt`` where that is the caller's to do.

        What is finalized before a refit has begun is left from the one before.

        Raises:
            InjectedError: that is the fault.
        """
        if phase == "finalize" and not self._began:
            return ""
        order = self._take(lambda order: order.phase == phase and not order.kind)
        if order is None:
            return ""
        if order.fault in {"drop", "corrupt"}:
            return order.fault
        strike(order)
        return ""

    def damage_next_frame(self, fault: str) -> None:
        """Drop or corrupt the next frame that leaves this process."""
        self._frame = fault

    def count(self, kind: str) -> str:
        """Count one bucket; returns the fault that is to be done to it, if any."""
        with self._lock:
            number, total = self._counts[kind], self._totals[kind]
            self._counts[kind] += 1
        places = {"first": 0, "middle": total // 2, "last": total - 1}
        order = self._take(lambda order: order.kind == kind and places.get(order.phase) == number)
        return order.fault if order is not None else ""

    def frame(self, parts: list[bytes]) -> list[bytes] | None:
        """Return what becomes of a frame; `None` if it is lost."""
        fault, self._frame = self._frame, ""
        if fault == "drop":
            return None
        return [*parts[:-1], _flipped(parts[-1])] if fault == "corrupt" else parts

    def _take(self, fits: Callable[[Order], bool]) -> Order | None:
        with self._lock:
            order = self._order
            if order is None or not fits(order):
                return None
            self._order, self.struck = None, True
            return order


FAULTS = Faults()
"""Those of this process."""


def strike(order: Order) -> None:
    """Do what the order says, to this process or to another one."""
    pid = order.pid or os.getpid()
    if order.fault == "kill":
        os.kill(pid, signal.SIGKILL)
        time.sleep(0 if order.pid else _DEATH_S)  # until it has come
    elif order.fault == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif order.fault == "delay" and order.pid:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(DELAY_S, os.kill, (pid, signal.SIGCONT)).start()
    elif order.fault == "delay":
        time.sleep(DELAY_S)
    elif order.fault == "raise" and order.pid:
        os.kill(pid, signal.SIGUSR1)
    elif order.fault == "raise":
        raise InjectedError(RAISED)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :] if data else data


def install() -> None:
    """Put the wrappers into this process."""
    _wrap(BucketedCheckpointEngine, "_begin_refit", _beginning)
    _wrap(Link, "send", _sending)
    _wrap(Outlet, "publish", _publishing)
    _wrap(Inlet, "_fetch", _fetching)
    for wire in (ClientWire, ServerWire):
        _wrap(wire, "send", _leaving)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        return around(original, self, *arguments, **named)

    setattr(owner, name, wrapped)


def _beginning(begin: Callable[..., Any], engine: Any, side: str) -> Any:
    if side == "rollout":  # a trainer has a hook of its own for that
        FAULTS.connect()
    return begin(engine, side)


def _sending(send: Callable[..., None], link: Link, message: Any) -> None:
    kind = "bucket" if isinstance(message, Bucket) else "release" if isinstance(message, Release) else ""
    if not kind or FAULTS.count(kind) != "drop":
        send(link, message)


def _publishing(publish: Callable[..., None], outlet: Any, seq: int, slot: int, *bucket: Any) -> None:
    nbytes = bucket[0]
    if outlet.links and nbytes and FAULTS.count("publish") == "corrupt":
        outlet._refit.buffers[slot][nbytes // 2] ^= 0x10
    publish(outlet, seq, slot, *bucket)


def _fetching(fetch: Callable[..., torch.Tensor], inlet: Any, *arguments: Any) -> torch.Tensor:
    data = fetch(inlet, *arguments)
    if data.numel() and FAULTS.count("fetch") == "corrupt":
        data = data.clone()  # it may be the sender's own memory
        data[data.numel() // 2] ^= 0x10
    return data


def _leaving(send: Callable[..., bool], wire: Any, parts: list[bytes]) -> bool:
    kept = FAULTS.frame(parts)
    return True if kept is None else send(wire, kept)
