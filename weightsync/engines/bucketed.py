"""What all built-in transports share: one engine around a `BucketTransport`.

Here are the life of an engine and of a refit, and their clean-up; `session` holds the peers, `sender` and
`receiver` are the refit's two halves. A transport is a subclass that says which `BucketTransport` it uses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from typing import Any

import torch

from weightsync.control import ControlHub, Deadlines, Link
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.calls import CallLock
from weightsync.engines.lockstep import Lockstep, make_lockstep
from weightsync.engines.memory import TransferMemory
from weightsync.engines.metadata import WorkerMetadata, read_metadata
from weightsync.engines.receiver import BucketReceiver
from weightsync.engines.refit import Refit
from weightsync.engines.sender import BucketSender, drain_weights
from weightsync.engines.session import Session
from weightsync.engines.stream import Weights, closing_stream
from weightsync.engines.telling import tell_unmet
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import (
    ConfigurationError,
    LifecycleError,
    WeightSyncError,
)
from weightsync.tensors import digest_kind
from weightsync.topology import paired_policy_rank, paired_rollout_rank

MIB = 1 << 20
_CLOSE_S = 15.0


class BucketedCheckpointEngine(CheckpointEngine):
    """An engine that sends buckets through a `BucketTransport`, in pairs of policy and rollout rank.

    Args:
        bucket_size: bytes of each transfer buffer, at least 1 MiB.
        connect_s: seconds to wait for a peer at the beginning of a refit.
        stall_s: seconds without progress after which a peer is given up.
        total_s: seconds that a refit may take in all.
        silence_s: seconds without any sign of life after which a peer counts as lost.
        verify: ``"full"`` digests every chunk on both sides, ``"off"`` none.
        poison_released: overwrite receive buffers when they are given back, to show late readers.
        bind_host: address that the control socket binds; default: the host's outgoing interface.
        advertise_host: address that peers are told; default: ``bind_host``.
    """

    transport_name: str

    def __init__(
        self,
        bucket_size: int,
        *,
        connect_s: float = 60.0,
        stall_s: float = 300.0,
        total_s: float = 3600.0,
        silence_s: float = 15.0,
        verify: str = "full",
        poison_released: bool = False,
        bind_host: str | None = None,
        advertise_host: str | None = None,
    ) -> None:
        if bucket_size < MIB:
            raise ConfigurationError(
                f"bucket_size must be at least 1 MiB ({MIB} bytes), got {bucket_size}: "
                f"raise update_weights_bucket_memory_ratio"
            )
        if verify not in {"full", "off"}:
            raise ConfigurationError(f"verify must be 'full' or 'off', got {verify!r}")
        self.bucket_size = bucket_size
        self._deadlines = Deadlines(
            connect_s=connect_s, stall_s=stall_s, total_s=total_s, silence_s=silence_s
        )
        self._verify = verify == "full"
        self._poison_released = poison_released
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._memory = TransferMemory(self.make_transport, bucket_size)
        self._session: Session | None = None
        self._waiter = Waiter()
        self._next: tuple[int | None, int | None] = (None, None)
        self._calls = CallLock()
        self._closed = False
        self._stats: dict[str, float] = {}

    @abstractmethod
    def make_transport(self) -> BucketTransport:
        """Return the transport; called once, at the first `prepare`."""

    # Setting up.

    def prepare(self) -> dict[str, Any]:
        """Allocate and register the buffers, if that is not done yet, and open a new session.

        Returns:
            Plain data for the peers, see `WorkerMetadata`.

        Raises:
            LifecycleError: the engine is closed, or another call is running.
        """
        with self._calls.hold("prepare"):
            if self._closed:
                raise LifecycleError("this engine is closed: make a new one")
            self._memory.require_sound()
            self._close_session()
            transport = self._memory.allocate()
            hub = ControlHub(
                self.transport_name,
                bind_host=self._bind_host,
                advertise_host=self._advertise_host,
                deadlines=self._deadlines,
            )
            own = WorkerMetadata(
                engine=self.transport_name,
                bucket_size=self.bucket_size,
                digest=digest_kind(self._memory.buffers[0].device) if self._verify else "off",
                control=hub.card(),
                transport=transport.describe(),
            )
            self._session = Session(hub, own)
            return own.to_dict()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the paired rollout rank, if there is one, and to the policy ranks to keep in step with.

        Raises:
            ConfigurationError: the world sizes cannot be paired, or the metadata are not this engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        with self._calls.hold("init_policy_process_group"):
            partner = paired_rollout_rank(
                worker_rank, train_world_size=train_world_size, rollout_world_size=rollout_world_size
            )
            entries = self._read(metadata, train_world_size + rollout_world_size, worker_rank)
            peer = None if partner is None else (partner, entries[train_world_size + partner])
            with self._joining(peer[1] if peer else None) as session:
                session.join_policy(worker_rank, entries[:train_world_size], peer)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the paired policy rank.

        Raises:
            ConfigurationError: the world sizes cannot be paired, or the metadata are not this engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        with self._calls.hold("init_rollout_process_group"):
            partner = paired_policy_rank(
                rollout_rank, train_world_size=train_world_size, rollout_world_size=rollout_world_size
            )
            own_index = train_world_size + rollout_rank
            entries = self._read(metadata, train_world_size + rollout_world_size, own_index)
            with self._joining(entries[partner]) as session:
                session.join_rollout(rollout_rank, (partner, entries[partner]))

    # One refit.

    def open_refit(self, *, epoch: int, version: int) -> None:
        """Name the next refit; peers that name another are not answered."""
        self._next = (epoch, version)

    async def send_weights(self, weights: Weights) -> None:
        """Send a weight stream to the paired rollout rank; ranks without one keep their stream in step.

        Returns once the receiver has taken everything. The generator is consumed once and closed.

        Raises:
            WeightSyncError: with peer, phase, tensor, bucket and bytes so far where they are known.
        """
        with closing_stream(weights), self._calls.hold("send_weights"):
            session, refit = self._begin_refit("policy")
            # Another rank may have to wait for its receiver, first to come and then to take a bucket.
            patience_s = self._deadlines.connect_s + self._deadlines.stall_s
            lockstep = make_lockstep(refit.rank, session.step_links, self._waiter, refit.budget, patience_s)
            with session.saying_drops():
                try:
                    await lockstep.begin(refit.meet)
                    self._stats = await self._send(weights, session.link, refit, lockstep)
                except BaseException as error:
                    lockstep.stop(refit.sign(error))
                    refit.tell_unmet(error)
                    raise
                finally:
                    lockstep.end()

    async def _send(
        self, weights: Weights, link: Link | None, refit: Refit, lockstep: Lockstep
    ) -> dict[str, float]:
        if link is None:
            await drain_weights(weights, lockstep, refit)
            return refit.figures()
        sender = BucketSender(refit, link, lockstep)
        with refit.on(link):
            await refit.meet(link)
            refit.transport.open(sending=True)
            sent = await sender.send(weights)
        return refit.figures(sent, sender.buckets_sent)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of ``(name, tensor)``; a tensor is valid until the next batch is asked for.

        Raises:
            WeightSyncError: the sender failed or was lost, or what came is not what was promised.
        """
        with self._calls.hold("receive_weight_batches"):
            session, refit = self._begin_refit("rollout")
            if session.link is None:
                raise LifecycleError("this rank has no peer")
            receiver = BucketReceiver(
                refit,
                session.link,
                poison_released=self._poison_released,
                manifest_check=self.manifest_check,
            )
            with session.saying_drops(), refit.on(session.link, drain=partial(self._memory.drain, receiver)):
                await refit.meet(session.link)
                refit.transport.open(sending=False)
                async with aclosing(receiver.batches()) as batches:
                    async for batch in batches:
                        yield batch
                        del batch  # a merged tensor owns its memory: let it go before the next one is made
            self._stats = refit.figures(receiver.received, receiver.batches_yielded)

    def abort_refit(self, error: BaseException) -> None:
        """Tell the peers why this side failed; they raise it with its traceback.

        Before this side has begun the refit that `open_refit` named, it tells those peers that wait for it.
        """
        session = self._session
        if session is None:
            return
        if isinstance(error, WeightSyncError):
            error.with_context(side=session.role, rank=session.rank)
        if self._next[0] is None or self._calls.holder is not None:
            session.abort(error)
            return
        with self._calls.hold("abort_refit"):
            (epoch, version), self._next = self._next, (None, None)
            tell_unmet(session.links, error, epoch=epoch, version=version)

    def refit_stats(self) -> dict[str, float]:
        """Return the last complete refit's bytes, tensors, batches and ``seconds_<phase>``."""
        return dict(self._stats)

    # Tearing down.

    def finalize(self) -> None:
        """Keep buffers and peers for the next refit.

        Raises:
            LifecycleError: a refit is running.
        """
        with self._calls.hold("finalize"):
            self._next = (None, None)
            self._after_refit()

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

    def _after_refit(self) -> None:
        """Free what shall not outlive a refit; nothing by default."""

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

    def _begin_refit(self, role: str) -> tuple[Session, Refit]:
        session, transport = self._prepared()
        if session.role != role or session.rank is None:
            raise LifecycleError(
                f"this engine has not joined as a {role} worker: call init_{role}_process_group() first"
            )
        (epoch, version), self._next = self._next, (None, None)
        return session, Refit(
            side=role,
            rank=session.rank,
            epoch=epoch,
            version=version,
            transport=transport,
            buffers=self._memory.buffers,
            waiter=self._waiter,
            deadlines=self._deadlines,
            verify=self._verify,
            budget=Budget(self._deadlines.total_s),
            unmet=session.links,
        )

    def _prepared(self) -> tuple[Session, BucketTransport]:
        transport = self._memory.require()
        if self._session is None:
            raise LifecycleError(
                "the engine is not prepared: call prepare() and join the process group first"
            )
        return self._session, transport

    def _read(self, metadata: list[Any], expected: int, own_index: int) -> list[WorkerMetadata]:
        session, _ = self._prepared()
        session.require_unjoined()
        return read_metadata(metadata, expected=expected, own_index=own_index, own=session.own)

    @contextmanager
    def _joining(self, peer: WorkerMetadata | None) -> Iterator[Session]:
        """Join a process group whole or not at all: after a failure the engine is to be prepared again."""
        session, transport = self._prepared()
        try:
            if peer is not None:
                transport.connect(peer.transport)
            yield session
        except BaseException:
            self._close_session()
            raise
