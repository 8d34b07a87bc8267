"""The Mooncake checkpoint engine: receivers read the senders' buckets one-sidedly.

A sender fills a registered buffer and tells its address on the control channel; the receivers read it into
a registered buffer of their own through Mooncake's TransferEngine, over TCP or RDMA. No metadata server is
needed. Mooncake's own ports are open on every interface and know no password: whoever reaches them can read
and write the transfer buffers, and no other memory.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from weightsync.control import Bucket
from weightsync.control.addresses import choose_hosts
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.buffers import allocate_bucket, require_device
from weightsync.engines.mooncake_session import PROTOCOLS, MooncakeSession, borrow_session, return_session
from weightsync.engines.transport import SLOTS, BucketTransport, Check, Peer, Place
from weightsync.errors import ConfigurationError, DeadlineError, LifecycleError, ProtocolError, TransportError
from weightsync.topology import RankId

_ADDRESS_BYTES = 8
_DRAIN_S = 1.0
_REASON_S = 1.0


class MooncakeTransport(BucketTransport):
    """Buckets through reads of Mooncake's TransferEngine.

    Args:
        device: of the transfer buffers.
        host: address of this host that peers are told.
        protocol: ``"tcp"`` or ``"rdma"``.
        device_name: RDMA devices to use, names with commas between them; empty: all.
    """

    def __init__(self, device: torch.device, *, host: str, protocol: str, device_name: str) -> None:
        self._device = device
        self._settings = (host, protocol, device_name)
        self._session: MooncakeSession | None = None
        self._bucket_size = 0
        self._buffers: list[torch.Tensor] = []
        self._sources: dict[RankId, str] = {}
        """The sessions of those that are read from."""

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register two buffers.

        Raises:
            ConfigurationError: Mooncake is not installed, does not start, or cannot move GPU memory.
        """
        if self._session is None:
            self._session = borrow_session(*self._settings)
        if self._device.type == "cuda" and not self._session.on_gpu:
            raise ConfigurationError(
                "device: cuda needs a build of Mooncake that knows GPUs: install mooncake-transfer-engine in "
                "place of mooncake-transfer-engine-non-cuda, or write device: cpu"
            )
        self._bucket_size = bucket_size
        for _ in range(SLOTS):
            self.extend()
        return list(self._buffers)

    def extend(self) -> torch.Tensor:
        """Make and register one more buffer."""
        session = self._require_session()
        buffer = allocate_bucket(self._bucket_size, self._device)
        # One by one, so that what a failure leaves behind is known to `release`.
        session.register(buffer)
        self._buffers.append(buffer)
        return buffer

    def describe(self) -> dict[str, Any]:
        """Return the session's name, and what moves its bytes."""
        return {"session": self._require_session().name, "protocol": self._settings[1]}

    def connect(self, place: Place) -> None:
        """Take the sources' sessions; a connection is made by the first read.

        Raises:
            ConfigurationError: a peer uses another protocol, or its description is damaged.
        """
        self._require_session()
        self._sources = {peer.who: self._session_of(peer) for peer in place.sources}

    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Wait for the end of reads that earlier refits gave up: they write into the same buffers."""
        self._require_session().settle(timeout_s=timeout_s, check=check)

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Return the buffer's address: the receivers read it where it is."""
        return self._buffers[slot].data_ptr().to_bytes(_ADDRESS_BYTES, "little")

    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Read a bucket from the sender's buffer into a local one."""
        session, target = self._require_session(), self._buffers[slot][: bucket.nbytes]
        if source not in self._sources:
            raise LifecycleError(f"this Mooncake transport does not know {source}")
        if len(bucket.payload) != _ADDRESS_BYTES:
            raise ProtocolError("the sender did not tell a buffer's address", peer=str(source))
        address = int.from_bytes(bucket.payload, "little")
        try:
            failure = session.read(self._sources[source], address, target, timeout_s=timeout_s, check=check)
        except DeadlineError as error:
            error.with_context(peer=str(source), bucket=bucket.seq)
            raise
        if failure is not None:
            _let_speak(check)
            raise TransportError(failure, peer=str(source), bucket=bucket.seq)
        return target

    def shut(self) -> None:
        """Nothing to do: Mooncake answers readers by itself, and a read that was given up ends by itself."""

    def disconnect(self) -> None:
        """Forget the peers; Mooncake makes a connection for each read."""
        self._sources = {}

    def release(self) -> None:
        """Disconnect, deregister and free the buffers; the session stays."""
        self.disconnect()
        session = self._session
        if session is None:
            return
        settled = True
        try:
            session.settle(timeout_s=_DRAIN_S, check=lambda: None)
        except DeadlineError:
            settled = False
        while self._buffers:
            session.unregister(self._buffers.pop())
        if not settled:
            # The read keeps its buffer alive until it has ended, and the session goes with it: who takes one
            # next must not have to wait.
            self._session = None

    def close(self) -> None:
        """Release, and give the session back to the process."""
        self.release()
        session, self._session = self._session, None
        if session is not None:
            return_session(session, *self._settings)

    def _session_of(self, peer: Peer) -> str:
        name, protocol, own = peer.transport.get("session"), peer.transport.get("protocol"), self._settings[1]
        if protocol != own:
            raise ConfigurationError(
                f"{peer.who} uses Mooncake with protocol {protocol}, this worker with {own}: set protocol "
                f"alike on both sides"
            )
        if not isinstance(name, str) or not name.rpartition(":")[2].isdecimal():
            raise ConfigurationError(f"the Mooncake metadata of {peer.who} are damaged: session {name!r:.80}")
        return name

    def _require_session(self) -> MooncakeSession:
        if self._session is None:
            raise LifecycleError("this Mooncake transport has no buffers: allocate them first")
        return self._session


def _let_speak(check: Check) -> None:
    """Give the control channel a moment to say why a read failed: Mooncake knows no more than that it did."""
    end = time.monotonic() + _REASON_S
    while time.monotonic() < end:
        check()
        time.sleep(_REASON_S / 50)


class MooncakeCheckpointEngine(BucketedCheckpointEngine):
    """Buckets through Mooncake's TransferEngine, staged in two registered buffers on each side.

    Args:
        bucket_size: bytes of each of the two transfer buffers, at least 1 MiB.
        device: ``"cuda"`` or ``"cpu"``: where the buffers are.
        protocol: ``"tcp"``, which works everywhere, or ``"rdma"``.
        device_name: RDMA devices to use, names with commas between them; empty: all.
        common: keywords of `BucketedCheckpointEngine`. Mooncake tells peers ``advertise_host``, too.
    """

    transport_name = "mooncake"
    topologies = ("pairs", "star", "ring", "tree", "stripes")

    def __init__(
        self,
        bucket_size: int,
        *,
        device: str = "cuda",
        protocol: str = "tcp",
        device_name: str = "",
        **common: Any,
    ) -> None:
        super().__init__(bucket_size, **common)
        if protocol not in PROTOCOLS:
            raise ConfigurationError(
                f"protocol must be {' or '.join(map(repr, PROTOCOLS))}, got {protocol!r}"
            )
        if device_name and protocol == "tcp":
            raise ConfigurationError("device_name names RDMA devices: write protocol: rdma, or leave it out")
        self._device = require_device(device)
        self._protocol = protocol
        self._device_name = device_name

    def make_transport(self) -> BucketTransport:
        """Return a transport that tells peers the same host as the control channel."""
        _, host = choose_hosts(self._bind_host, self._advertise_host)
        return MooncakeTransport(
            self._device, host=host, protocol=self._protocol, device_name=self._device_name
        )
