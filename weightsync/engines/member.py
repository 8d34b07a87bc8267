"""The life of an engine with transfer buffers and peers: made, prepared, joined, kept or torn down."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from weightsync.control import ControlHub, Deadlines
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.calls import CallLock, not_prepared, require_open, require_unjoined
from weightsync.engines.joining import TopologyChoice, place_of, read_entries
from weightsync.engines.memory import TransferMemory
from weightsync.engines.metadata import WorkerMetadata
from weightsync.engines.sampling import ChunkChecks
from weightsync.engines.session import Session
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Waiter
from weightsync.errors import ConfigurationError, LifecycleError
from weightsync.topology import DEFAULT_FAN_OUT, RankId, Topology

MIB = 1 << 20
_CLOSE_S = 15.0


class MemberEngine(CheckpointEngine):
    """An engine with transfer buffers and peers: all of a `BucketedCheckpointEngine` but its refits.

    Args:
        bucket_size: bytes of each transfer buffer, at least 1 MiB.
        topology: one of the engine's `topologies`, or ``"auto"``; default: `default_topology`.
        fan_out: of a tree: how many ranks each rank sends to.
        connect_s: seconds to wait for a peer at the beginning of a refit.
        stall_s: seconds without progress after which a peer is given up.
        total_s: seconds that a refit may take in all.
        silence_s: seconds without any sign of life after which a peer counts as lost.
        verify: ``"full"`` digests every chunk on both sides, ``"sample"`` one in 16, ``"off"`` none.
        poison_released: overwrite receive buffers when they are given back, to show late readers.
        release_after_refit: free the buffers in `finalize`; the next `prepare` makes new ones.
        bind_host: address that the control socket binds; default: the host's outgoing interface.
        advertise_host: address that peers are told; default: ``bind_host``.
    """

    transport_name: ClassVar[str]
    topologies: ClassVar[tuple[str, ...]]
    """What ``topology`` may be, beside ``"auto"``."""
    default_topology: ClassVar[str] = "pairs"
    keeps_buckets: ClassVar[bool] = False
    """Whether policy ranks keep what they have sent, for workers that come later; see `held`."""
    why_these_topologies: ClassVar[str] = ""
    """Said to who asks for another topology: ``a collective has one sender``."""

    def __init__(
        self,
        bucket_size: int,
        *,
        topology: str | None = None,
        fan_out: int = DEFAULT_FAN_OUT,
        connect_s: float = 60.0,
        stall_s: float = 300.0,
        total_s: float = 3600.0,
        silence_s: float = 15.0,
        verify: str = "full",
        poison_released: bool = False,
        release_after_refit: bool = False,
        bind_host: str | None = None,
        advertise_host: str | None = None,
    ) -> None:
        if bucket_size < MIB:
            raise ConfigurationError(
                f"bucket_size must be at least 1 MiB ({MIB} bytes), got {bucket_size}: "
                f"raise update_weights_bucket_memory_ratio"
            )
        self.bucket_size = bucket_size
        self.topology = self.default_topology if topology is None else topology
        self.fan_out = fan_out
        self._choice = TopologyChoice(
            self.transport_name, self.topology, fan_out, self.topologies, self.why_these_topologies
        )
        self._deadlines = Deadlines(
            connect_s=connect_s, stall_s=stall_s, total_s=total_s, silence_s=silence_s
        )
        self._verify = ChunkChecks(verify).mode
        self._poison_released = poison_released
        self._release_after_refit = release_after_refit
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._memory = TransferMemory(self.make_transport, bucket_size, poisons=poison_released)
        self._session: Session | None = None
        self._waiter = Waiter()
        self._next: tuple[int | None, int | None] = (None, None)
        self._receivers: tuple[int, ...] | None = None
        self._calls = CallLock()
        self._closed = False

    @abstractmethod
    def make_transport(self) -> BucketTransport:
        """Return the transport; called once, at the first `prepare`."""

    def take_memory(self) -> bytes:
        """Lend this rank's part in a refit by regions to the transport; returns what peers are told of it."""
        return b""

    # Setting up.

    def refuses(self, *, train_world_size: int, rollout_world_size: int) -> str | None:
        """Return why the topology does not fit the world sizes; `None` if it does."""
        try:
            self._choice.of(train_world_size, rollout_world_size)
        except ConfigurationError as error:
            return error.message
        return None

    def prepare(self) -> dict[str, Any]:
        """Allocate and register the buffers, if that is not done yet, and open a new session.

        Returns:
            Plain data for the peers, see `WorkerMetadata`.

        Raises:
            LifecycleError: the engine is closed, or another call is running.
        """
        with self._calls.hold("prepare"):
            require_open(closed=self._closed)
            self._memory.require_sound()
            self._close_session()
            transport = self._memory.allocate()
            table = self.take_memory()
            hub = ControlHub(
                self.transport_name,
                bind_host=self._bind_host,
                advertise_host=self._advertise_host,
                deadlines=self._deadlines,
            )
            guests = hub.accept_guests() if self.keeps_buckets else None
            own = WorkerMetadata(
                engine=self.transport_name,
                bucket_size=self.bucket_size,
                digest=ChunkChecks(self._verify).kind(self._memory.buffers[0].device),
                topology=self.topology,
                fan_out=self.fan_out,
                control=hub.card(),
                transport=transport.describe(),
                guests=guests.ticket.to_dict() if guests is not None else {},
                table=table,
            )
            self._session = Session(hub, own, guests)
            return own.to_dict()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the ranks that this one sends to, if any, and to the policy ranks to keep in step with.

        Raises:
            ConfigurationError: the topology does not fit the world sizes, or the metadata are not this
                engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        self._join(RankId("policy", worker_rank), train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the ranks that this one receives from, and to those that it forwards to.

        Raises:
            ConfigurationError: the topology does not fit the world sizes, or the metadata are not this
                engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        self._join(RankId("rollout", rollout_rank), train_world_size, rollout_world_size, metadata)

    def update_process_group(
        self, *, rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take another rank among other peers; links and connections to the same peers are kept.

        Raises:
            ConfigurationError: the topology does not fit the world sizes, or the metadata are not this
                engine's.
            LifecycleError: the engine has not joined a process group, or a refit is running.
        """
        with self._calls.hold("update_process_group"):
            session, _ = self._prepared()
            if session.who is None or session.is_late:
                raise LifecycleError("update_process_group: this engine has not joined a process group")
            topology = self._choice.of(train_world_size, rollout_world_size)
            self._enter(RankId(session.who.side, rank), topology, metadata)

    # Tearing down.

    def finalize(self) -> None:
        """Keep buffers and peers for the next refit, or release them, as configured.

        Raises:
            LifecycleError: a refit is running.
        """
        with self._calls.hold("finalize"):
            self._next = (None, None)
            if self._release_after_refit:
                self._release()

    def close(self) -> None:
        """Disconnect and free everything. Idempotent. A refit that runs in another thread is aborted first.

        Raises:
            LifecycleError: a refit runs in this thread, or does not end: nothing was freed.
        """
        session = self._session
        if self._calls.holder is not None and session is not None:
            self.abort_refit(LifecycleError("the engine was closed during a refit"))
            session.close()  # wakes what still waits for a peer to begin
        with self._calls.hold("close", patience_s=_CLOSE_S):
            self._closed = True
            with ExitStack() as rest:
                rest.callback(self._waiter.close)
                rest.callback(self._memory.close_transport)
                self._release()

    def _release(self) -> None:
        """Drop the peers, then free the buffers, which a peer may read until it is dropped."""
        self._close_session()
        self._memory.release()

    def _close_session(self) -> None:
        session, self._session = self._session, None
        try:
            self._memory.disconnect()
        finally:
            if session is not None:
                session.close()

    # Pieces.

    def _prepared(self) -> tuple[Session, BucketTransport]:
        transport = self._memory.require()
        if self._session is None:
            raise not_prepared()
        return self._session, transport

    def _join(self, who: RankId, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        """Join a process group for the first time since `prepare`, together with all other workers."""
        with self._calls.hold(f"init_{who.side}_process_group"):
            session, _ = self._prepared()
            require_unjoined(session.who)
            self._enter(who, self._choice.of(train_world_size, rollout_world_size), metadata)

    def _enter(self, who: RankId, topology: Topology, metadata: list[Any], *, late: bool = False) -> None:
        session, _ = self._prepared()
        entries = read_entries(metadata, who, topology, session.own, late=late)
        everyone = tuple(range(topology.rollout_world_size))
        self._take_place(who, topology, entries, everyone, late=late)

    def _choose(self, session: Session, who: RankId, receivers: tuple[int, ...] | None) -> None:
        """Let some rollout ranks take part in the next refit, or all of them."""
        if receivers == self._receivers:
            return
        with self._calls.hold("open_refit"):
            train = session.train_world_size
            world = len(session.entries) - train
            chosen = tuple(range(world)) if receivers is None else receivers
            topology = self._choice.among(chosen, train, world)
            self._take_place(who, topology, session.entries, chosen)
            self._receivers = receivers

    def _take_place(
        self,
        who: RankId,
        topology: Topology,
        entries: Sequence[WorkerMetadata],
        receivers: tuple[int, ...],
        *,
        late: bool = False,
    ) -> None:
        """Connect whole or not at all: after a failure the engine is to be prepared again.

        Late means that the others have joined long before; ``entries`` are the policy ranks' then.
        """
        session, transport = self._prepared()
        try:
            transport.connect(place_of(who, topology, entries, receivers))
            join = session.join_late if late else session.join
            join(who, topology, entries)
        except BaseException:
            self._close_session()
            raise
        self._receivers = None
