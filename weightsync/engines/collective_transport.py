"""The transport of the collective engines: buckets by broadcast in a process group of weightsync's own.

Policy rank 0 is rank 0 of the group, rollout rank *j* its rank *j* + 1; the other policy ranks keep their
stream in step and are in no group. Bytes go from the sender's buffers into each receiver's, all else over the
control channel. `collective_meeting` says how the ranks agree on a group, `collective_group` how one is made,
used and given up.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from weightsync.control import Bucket
from weightsync.control.addresses import choose_hosts, is_wildcard
from weightsync.engines.collective_backends import CollectiveBackend
from weightsync.engines.collective_group import ROOT, Broadcast, Group, run_apart
from weightsync.engines.collective_meeting import Meeting, host_store, join_store, reserve_port
from weightsync.engines.descriptions import describe, read_description, require_alike
from weightsync.engines.transport import SLOTS, BucketTransport, Check, Peer, Place
from weightsync.engines.waiting import await_ended, await_reason
from weightsync.errors import (
    LifecycleError,
    ProtocolError,
    TransportError,
    WeightSyncError,
)
from weightsync.topology import RankId

_log = logging.getLogger(__name__)
_STORE_S = 30.0
_HEARSAY_S = 2.0
_END_S = 1.0
_SHUT_S = 0.2
"""Why a refit failed is told only after it is shut, so this is short."""
_MARGIN_S = 1.0
_PAUSE_S = 0.01


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `CollectiveTransport.describe` tells: the library, and where this worker's store would be."""

    backend: str
    host: str
    port: int
    session: str


@dataclass(frozen=True)
class _Seat:
    """This worker's place in the group, and where its store is."""

    rank: int
    size: int
    session: str
    host: str
    port: int


class CollectiveTransport(BucketTransport):
    """Buckets through broadcasts in a process group of policy rank 0 and all rollout ranks.

    The group is kept from refit to refit unless one of its ranks has broken it, or ``rebuild_group`` is set.
    A broadcast that waits for a lost peer is left to itself, and its buffer is replaced by a new one.

    Args:
        backend: the library.
        bind_host: as for the engine; also where gloo's sockets are bound.
        advertise_host: as for the engine.
        rebuild_group: form a new group for each refit.
        limit_s: seconds that a broadcast may wait for the receivers.
    """

    def __init__(
        self,
        backend: CollectiveBackend,
        *,
        bind_host: str | None,
        advertise_host: str | None,
        rebuild_group: bool,
        limit_s: float,
    ) -> None:
        self._backend = backend
        self._hosts = choose_hosts(bind_host, advertise_host)
        self._rebuild_group = rebuild_group
        self._limit_s = limit_s
        self._buffers: list[torch.Tensor] = []
        self._broadcasts: dict[int, Broadcast] = {}
        """The last one from or into each buffer."""
        self._listener: socket.socket | None = None
        self._session = ""
        self._seat: _Seat | None = None
        self._served: tuple[Store, int] | None = None
        """The store that this worker serves as policy rank 0, and its port."""
        self._store: Store | None = None
        """What the seat's group agrees in."""
        self._group: Group | None = None
        self._is_broken = False
        self._due = 0
        """The bucket whose broadcast comes next."""

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make two buffers; `open` exchanges one in the returned list that a lost broadcast still holds."""
        self._buffers = [self._backend.allocate(bucket_size) for _ in range(SLOTS)]
        return self._buffers

    def describe(self) -> dict[str, Any]:
        """Return where this worker's store would be; only that of policy rank 0 is served."""
        self.disconnect()
        bind, advertise = self._hosts
        self._listener = reserve_port(bind)
        self._session = uuid.uuid4().hex
        port = self._listener.getsockname()[1]
        return describe(_Described(self._backend.name, advertise, port, self._session))

    def connect(self, place: Place) -> None:
        """Take a seat in the group, and serve its store at policy rank 0.

        Raises:
            ConfigurationError: a peer uses another library, or its description is damaged.
            LifecycleError: `describe` was not called.
        """
        if not self._session:
            raise LifecycleError("the transport has not been described: call prepare() first")
        listener, self._listener = self._listener, None
        with listener or nullcontext():
            for peer in (*place.sources, *place.targets):
                require_alike(peer, "refit_transport", peer.transport.get("backend"), self._backend.name)
            # Other ranks than last time make another group, and agree on it in a place of their own.
            self._drop_group()
            self._seat = self._store = None
            among = ".".join(map(str, place.taking_part))
            size = len(place.taking_part) + 1
            if place.targets:
                if listener is not None:
                    port = listener.getsockname()[1]
                    self._served = host_store(listener, self._hosts[0], timeout_s=_STORE_S), port
                store, port = self._require_served()
                self._seat = _Seat(ROOT, size, f"{self._session}/{among}", self._hosts[1], port)
                self._store = self._prefixed(store)
            elif place.sources:
                seat = place.taking_part.index(place.who.rank) + 1
                self._seat = _seat_beside(place.sources[0], seat, size, among)

    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Agree with all other ranks on a group, and form it if none that all of them hold is whole.

        Raises:
            DeadlineError: they did not come in time.
            TransportError: the group could not be formed.
        """
        seat = self._require_seat()
        self._exchange_held_buffers()
        deadline = time.monotonic() + timeout_s

        def form(go_on: Check) -> tuple[Store, Group]:
            store = self._store or self._prefixed(join_store(seat.host, seat.port, timeout_s=timeout_s))
            return store, self._form(store, seat, deadline, go_on)

        self._is_broken = True
        try:
            self._store, self._group = run_apart(
                form,
                undo=lambda made: made[1].drop(patience_s=0.0),
                timeout_s=timeout_s,
                check=check,
                what=f"forming the {self._backend.name} group of {seat.size} ranks",
            )
        except Exception as error:
            if seat.rank != ROOT:
                self._store = None  # what was left behind may still be in a call on it
            if isinstance(error, WeightSyncError) or not isinstance(error, RuntimeError):
                raise
            raise self._explained("the group could not be formed", error, check) from error
        self._is_broken, self._due = False, 0

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Post the broadcast; the receivers post theirs when they hear of the bucket."""
        self._post(slot, nbytes, self._limit_s)
        return b""

    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Take part in the bucket's broadcast, into a local buffer."""
        if bucket.seq != self._due:
            # gloo ends the process when more bytes come than a broadcast was posted for.
            self._is_broken = True
            raise ProtocolError(
                f"bucket {bucket.seq} was announced where bucket {self._due} was due: a broadcast is missing"
            )
        self._due += 1
        # The library's own limit comes later than ours: it breaks the group's connections.
        self._post(slot, bucket.nbytes, timeout_s + _MARGIN_S)
        self._await(slot, timeout_s=timeout_s, check=check)
        # A peer that was stopped for long may have sent this from a buffer that is another bucket's by now.
        check()
        return self._buffers[slot][: bucket.nbytes]

    def settle(self, slot: int, *, timeout_s: float, check: Check) -> None:
        """Wait until the library has let go of a published buffer."""
        if slot in self._broadcasts:
            self._await(slot, timeout_s=timeout_s, check=check)

    def shut(self) -> None:
        """Keep the group if everything in it has ended well; give it up otherwise."""
        if self._group is None:
            return
        end = time.monotonic() + _SHUT_S
        while not self._is_broken and not self._have_ended() and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        failed = any(each.failure is not None for each in self._broadcasts.values())
        if self._is_broken or failed or not self._have_ended():
            self._drop_group(patience_s=_SHUT_S)

    def disconnect(self) -> None:
        """Leave the group and its store."""
        self._drop_group()
        self._session, self._seat, self._served, self._store = "", None, None, None
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def release(self) -> None:
        """Disconnect and forget the buffers; one that a lost broadcast holds is freed at its end."""
        self.disconnect()
        self._buffers, self._broadcasts = [], {}

    def close(self) -> None:
        """Release; nothing else is kept."""
        self.release()

    # Pieces.

    def _form(self, store: Store, seat: _Seat, deadline: float, go_on: Check) -> Group:
        """Return the group of the next refit. Runs in a thread of its own, see `run_apart`."""
        known = self._group
        held = None if known is None or self._rebuild_group else known.state
        plan = Meeting(store, rank=seat.rank, size=seat.size, held=held).agree(go_on)
        if plan.keep and known is not None:
            return known
        if known is not None:
            known.drop(patience_s=_END_S)
        bind, advertise = self._hosts
        return Group.form(
            self._backend,
            store,
            label=plan.name,
            rank=seat.rank,
            size=seat.size,
            host=advertise if is_wildcard(bind) else bind,
            timeout_s=max(deadline - time.monotonic(), _MARGIN_S),
            go_on=go_on,
        )

    def _post(self, slot: int, nbytes: int, limit_s: float) -> None:
        if self._group is None:
            raise LifecycleError("no refit is open")
        try:
            posted = self._group.broadcast(self._buffers[slot][:nbytes], timeout_s=limit_s)
        except RuntimeError as error:
            self._is_broken = True
            raise TransportError(f"{self._backend.name} refused a broadcast: {error}") from error
        self._broadcasts[slot] = posted

    def _await(self, slot: int, *, timeout_s: float, check: Check) -> None:
        broadcast = self._broadcasts[slot]
        try:
            await_ended(
                lambda: broadcast.has_ended,
                timeout_s=timeout_s,
                check=check,
                what=f"a {self._backend.name} broadcast",
            )
            if broadcast.failure is not None:
                raise self._explained("a broadcast failed", broadcast.failure, check)
        except BaseException:
            self._is_broken = True
            raise

    def _explained(self, what: str, reason: object, check: Check) -> TransportError:
        """Return the error of a broken group, unless ``check`` raises why it broke, which is told soon.

        The library only knows that some rank is gone; the control channel knows which, and why.
        """
        await_reason(check, _HEARSAY_S)
        return TransportError(f"{self._backend.name}: {what}: {reason}")

    def _exchange_held_buffers(self) -> None:
        for slot, broadcast in self._broadcasts.items():
            if not broadcast.has_ended:
                _log.warning(
                    "a %s broadcast of an earlier refit still holds a transfer buffer: it gets a new one",
                    self._backend.name,
                )
                self._buffers[slot] = self._backend.allocate(self._buffers[slot].numel())
        self._broadcasts = {}

    def _have_ended(self) -> bool:
        return all(each.has_ended for each in self._broadcasts.values())

    def _drop_group(self, *, patience_s: float = _END_S) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.drop(patience_s=patience_s)

    def _require_seat(self) -> _Seat:
        if self._seat is None:
            raise LifecycleError("this worker is in no group: join the process group first")
        return self._seat

    def _require_served(self) -> tuple[Store, int]:
        if self._served is None:
            raise LifecycleError("this worker serves no store: call prepare() again")
        return self._served

    def _prefixed(self, store: Store) -> Store:
        session = self._seat.session if self._seat is not None else self._session
        return PrefixStore(session, store)


def _seat_beside(sender: Peer, rank: int, size: int, among: str) -> _Seat:
    store = read_description(sender, _Described)
    return _Seat(rank, size, f"{store.session}/{among}", store.host, store.port)
