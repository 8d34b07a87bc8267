"""The Mooncake checkpoint engine: receivers read the senders' buckets one-sidedly.

A sender fills a registered buffer and tells where it is on the control channel; the receivers read it into a
registered buffer of their own through Mooncake's TransferEngine, over TCP or RDMA. No metadata server is
needed. Mooncake's own ports are open on every interface and know no password: whoever reaches them can read
and write the transfer buffers, and no other memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import torch

from weightsync.control import Bucket
from weightsync.control.addresses import choose_hosts
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.buffers import require_device
from weightsync.engines.descriptions import read_payload, require_alike, write_payload
from weightsync.engines.mooncake_session import PROTOCOLS, MooncakeSession, borrow_session, return_session
from weightsync.engines.staged import StagedTransport
from weightsync.engines.transport import BucketTransport, Check, Place
from weightsync.engines.waiting import await_reason
from weightsync.errors import ConfigurationError, DeadlineError, LifecycleError, TransportError
from weightsync.topology import RankId

_DRAIN_S = 1.0
_REASON_S = 1.0


class MooncakeTransport(StagedTransport):
    """Buckets through reads of Mooncake's TransferEngine.

    Args:
        device: of the transfer buffers.
        host: address of this host that peers are told.
        protocol: ``"tcp"`` or ``"rdma"``.
        device_name: RDMA devices to use, names with commas between them; empty: all.
    """

    def __init__(self, device: torch.device, *, host: str, protocol: str, device_name: str) -> None:
        super().__init__(device)
        self._settings = (host, protocol, device_name)
        self._session: MooncakeSession | None = None

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register two buffers.

        Raises:
            ConfigurationError: Mooncake is not installed, does not start, or cannot move GPU memory.
        """
        if self._session is None:
            self._session = self._borrow()
        if self._device.type == "cuda" and not self._session.on_gpu:
            raise ConfigurationError(
                "device: cuda needs a build of Mooncake that knows GPUs: install mooncake-transfer-engine in "
                "place of mooncake-transfer-engine-non-cuda, or write device: cpu"
            )
        return super().allocate(bucket_size)

    def register(self, buffer: torch.Tensor) -> None:
        """Register it with the session."""
        self._require_session().register(buffer)

    def describe(self) -> dict[str, Any]:
        """Return what moves the bytes. Where they are is said of each bucket, see `publish`."""
        return {"protocol": self._protocol}

    def connect(self, place: Place) -> None:
        """Check that the sources fit; a connection is made by the first read.

        Raises:
            ConfigurationError: a source uses another protocol.
        """
        for peer in place.sources:
            require_alike(peer, "protocol", peer.transport.get("protocol"), self._protocol)

    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Take a new session, if a read through this one failed or was given up."""
        session = self._require_session()
        if session.is_spoiled:
            session.end(timeout_s=timeout_s, check=check)
            fresh = self._borrow()
            for buffer in self._buffers:
                fresh.register(buffer)
            self._session = fresh

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Return where the buffer is: the receivers read it there."""
        return write_payload(_Location(self._require_session().name, self._buffers[slot].data_ptr()))

    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Read a bucket from the sender's buffer into a local one."""
        session, target = self._require_session(), self._buffers[slot][: bucket.nbytes]
        where = {"peer": str(source), "bucket": bucket.seq}
        there = read_payload(bucket, _Location)
        try:
            failure = session.read(there.session, there.address, target, timeout_s=timeout_s, check=check)
        except DeadlineError as error:
            error.with_context(**where)
            raise
        if failure is not None:
            await_reason(check, _REASON_S)
            raise TransportError(failure, **where)
        return target

    def shut(self) -> None:
        """Nothing to do: Mooncake answers readers by itself."""

    def disconnect(self) -> None:
        """Nothing to do: what was learnt of a peer that does not come back is a line in Mooncake's books."""

    def release(self) -> None:
        """Deregister and free the buffers; the session stays, if it is in order."""
        session = self._session
        if session is None:
            return
        self._buffers = []
        if not session.is_spoiled:
            session.unregister_all()
            return
        self._session = None
        # A read that goes on keeps its buffer alive until it has ended.
        with contextlib.suppress(DeadlineError):
            session.end(timeout_s=_DRAIN_S, check=lambda: None)

    def close(self) -> None:
        """Release, and give the session back to the process."""
        self.release()
        session, self._session = self._session, None
        if session is not None:
            return_session(session, *self._settings)

    @property
    def _protocol(self) -> str:
        return self._settings[1]

    def _borrow(self) -> MooncakeSession:
        return borrow_session(*self._settings)

    def _require_session(self) -> MooncakeSession:
        if self._session is None:
            raise LifecycleError("this Mooncake transport has no buffers: allocate them first")
        return self._session


class _Location(msgspec.Struct, frozen=True, array_like=True):
    """What `MooncakeTransport.publish` says: a session, and an address in its process."""

    session: str
    address: int


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
