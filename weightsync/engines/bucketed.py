"""What all built-in transports share: one engine around a `BucketTransport`.

Here are the metadata, the peers, the life of a refit and its clean-up; `sender` and `receiver` are its two
halves. A transport is a subclass that says which `BucketTransport` it uses.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.control import ControlHub, Deadlines, Link
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.lockstep import FollowerLockstep, LeaderLockstep, Lockstep, SoloLockstep
from weightsync.engines.receiver import BucketReceiver
from weightsync.engines.sender import BucketSender, Weights, closing_stream, drain_weights
from weightsync.engines.stats import Stopwatch
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import ConfigurationError, IncompleteStreamError, LifecycleError
from weightsync.tensors import WeightManifest
from weightsync.topology import paired_policy_rank, paired_rollout_rank

MIB = 1 << 20


@dataclass(frozen=True)
class _Refit:
    """What belongs to one refit on one rank."""

    epoch: int | None
    version: int | None
    budget: Budget
    stopwatch: Stopwatch


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
        self._transport: BucketTransport | None = None
        self._buffers: list[torch.Tensor] = []
        self._hub: ControlHub | None = None
        self._waiter = Waiter()
        self._link: Link | None = None
        self._step_links: list[Link] = []
        self._role: str | None = None
        self._rank = 0
        self._next: tuple[int | None, int | None] = (None, None)
        self._busy = threading.Lock()
        self._stats: dict[str, float] = {}

    @abstractmethod
    def make_transport(self) -> BucketTransport:
        """Return the transport; called once, at the first `prepare`."""

    # Setting up.

    def prepare(self) -> dict[str, Any]:
        """Allocate and register the buffers, if that is not done yet, and open a new session.

        Returns:
            Plain data for the peers: engine, bucket size, control card and transport description.
        """
        with self._exclusively("prepare"):
            self._close_session()
            if self._transport is None:
                self._transport = self.make_transport()
            if not self._buffers:
                self._buffers = self._transport.allocate(self.bucket_size)
            self._hub = ControlHub(
                self.transport_name,
                bind_host=self._bind_host,
                advertise_host=self._advertise_host,
                deadlines=self._deadlines,
            )
            return {
                "engine": self.transport_name,
                "bucket_size": self.bucket_size,
                "control": self._hub.card(),
                "transport": self._transport.describe(),
            }

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the paired rollout rank, if there is one, and to the policy ranks to keep in step with.

        Raises:
            ConfigurationError: the world sizes cannot be paired, or the metadata are not this engine's.
        """
        with self._exclusively("init_policy_process_group"):
            hub, transport = self._require_prepared()
            self._require_metadata(metadata, train_world_size + rollout_world_size)
            partner = paired_rollout_rank(
                worker_rank, train_world_size=train_world_size, rollout_world_size=rollout_world_size
            )
            if partner is not None:
                peer = metadata[train_world_size + partner]
                transport.connect(peer["transport"])
                self._link = hub.accept(peer["control"])
            cards = [entry["control"] for entry in metadata[:train_world_size]]
            if worker_rank == 0:
                self._step_links = [hub.accept(card) for card in cards[1:]]
            else:
                self._step_links = [hub.connect(cards[0])]
            self._role, self._rank = "policy", worker_rank

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the paired policy rank.

        Raises:
            ConfigurationError: the world sizes cannot be paired, or the metadata are not this engine's.
        """
        with self._exclusively("init_rollout_process_group"):
            hub, transport = self._require_prepared()
            self._require_metadata(metadata, train_world_size + rollout_world_size)
            partner = paired_policy_rank(
                rollout_rank, train_world_size=train_world_size, rollout_world_size=rollout_world_size
            )
            transport.connect(metadata[partner]["transport"])
            self._link = hub.connect(metadata[partner]["control"])
            self._role, self._rank = "rollout", rollout_rank

    # One refit.

    def open_refit(self, *, epoch: int, version: int) -> None:
        """Name the next refit; peers that name another are not answered."""
        self._next = (epoch, version)

    async def send_weights(self, weights: Weights) -> None:
        """Send a weight stream to the paired rollout rank; ranks without one keep their stream in step.

        Returns once the receiver has loaded everything. The generator is consumed once and closed.

        Raises:
            WeightSyncError: with peer, phase, tensor, bucket and bytes so far where they are known.
        """
        with closing_stream(weights), self._exclusively("send_weights"):
            self._require_role("policy")
            refit = self._begin_refit()
            lockstep = self._make_lockstep(refit.budget)
            try:
                await lockstep.begin(refit.epoch, refit.version)
                if self._link is None:
                    await drain_weights(weights, self.bucket_size, lockstep, refit.stopwatch)
                    self._stats = _figures(refit.stopwatch)
                else:
                    await self._send(weights, self._link, lockstep, refit)
            except BaseException as error:
                lockstep.stop(error)
                raise
            finally:
                lockstep.end()

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of ``(name, tensor)``; a tensor is valid until the next batch is asked for.

        Raises:
            WeightSyncError: the sender failed or was lost, or what came is not what was promised.
        """
        with self._exclusively("receive_weight_batches"):
            self._require_role("rollout")
            link, transport, refit = self._require_link(), self._require_prepared()[1], self._begin_refit()
            receiver = BucketReceiver(
                link=link,
                transport=transport,
                buffers=self._buffers,
                waiter=self._waiter,
                budget=refit.budget,
                stall_s=self._deadlines.stall_s,
                verify=self._verify,
                poison_released=self._poison_released,
                manifest_check=self.manifest_check,
                stopwatch=refit.stopwatch,
            )
            with self._open_on(link, transport, sending=False, drain=receiver.close):
                await self._meet(link, refit)
                async with aclosing(receiver.batches()) as batches:
                    async for batch in batches:
                        yield batch
            self._stats = _figures(refit.stopwatch, receiver.received, receiver.batches_yielded)

    def abort_refit(self, error: BaseException) -> None:
        """Tell the peers why this side failed; they raise it with its traceback."""
        for link in (self._link, *self._step_links):
            if link is not None:
                link.abort(error)

    def refit_stats(self) -> dict[str, float]:
        """Return the last complete refit's bytes, tensors, batches and ``seconds_<phase>``."""
        return dict(self._stats)

    # Tearing down.

    def finalize(self) -> None:
        """Keep buffers and peers for the next refit; subclasses may release them here."""
        self._next = (None, None)

    def close(self) -> None:
        """Disconnect and free everything. Idempotent."""
        with self._exclusively("close"):
            self._close_session()
            self._release_buffers()
            self._waiter.close()

    def _release_buffers(self) -> None:
        if self._transport is not None:
            self._transport.release()
        self._buffers = []

    def _close_session(self) -> None:
        """Drop the peers, before any buffer that they may still read is freed."""
        if self._transport is not None:
            self._transport.disconnect()
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()
        self._link, self._step_links, self._role = None, [], None

    # Pieces.

    async def _send(self, weights: Weights, link: Link, lockstep: Lockstep, refit: _Refit) -> None:
        transport = self._require_prepared()[1]
        sender = BucketSender(
            link=link,
            transport=transport,
            buffers=self._buffers,
            lockstep=lockstep,
            waiter=self._waiter,
            budget=refit.budget,
            stall_s=self._deadlines.stall_s,
            verify=self._verify,
            stopwatch=refit.stopwatch,
        )
        with self._open_on(link, transport, sending=True):
            await self._meet(link, refit)
            sent = await sender.send(weights)
        self._stats = _figures(refit.stopwatch, sent, sender.buckets_sent)

    async def _meet(self, link: Link, refit: _Refit) -> None:
        with refit.stopwatch.phase("connect"):
            await self._waiter.run(lambda: link.begin(epoch=refit.epoch, version=refit.version))

    @contextmanager
    def _open_on(
        self,
        link: Link,
        transport: BucketTransport,
        *,
        sending: bool,
        drain: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hold a refit open on the link and the transport; a failure is told to the peer.

        ``drain`` ends what still uses the buffers. It comes after the link has ended, which wakes it, and
        before the transport shuts, which drops the connection that it uses.
        """
        failed = True
        transport.open(sending=sending)
        try:
            yield
            failed = False
        except GeneratorExit:
            link.abort(IncompleteStreamError("the consumer stopped before the end of the stream"))
            raise
        except BaseException as error:
            link.abort(error)
            raise
        finally:
            link.end()
            drain()
            transport.shut(failed=failed)

    def _make_lockstep(self, budget: Budget) -> Lockstep:
        if not self._step_links:
            return SoloLockstep()
        kind: type[LeaderLockstep | FollowerLockstep] = (
            LeaderLockstep if self._rank == 0 else FollowerLockstep
        )
        return kind(self._step_links, self._waiter, budget, self._deadlines.stall_s)

    def _begin_refit(self) -> _Refit:
        (epoch, version), self._next = self._next, (None, None)
        return _Refit(epoch, version, Budget(self._deadlines.total_s), Stopwatch())

    @contextmanager
    def _exclusively(self, call: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise LifecycleError(f"{call}: another call of this engine is still running")
        try:
            yield
        finally:
            self._busy.release()

    def _require_prepared(self) -> tuple[ControlHub, BucketTransport]:
        if self._hub is None or self._transport is None or not self._buffers:
            raise LifecycleError(
                "the engine is not prepared: call prepare() and join the process group first"
            )
        return self._hub, self._transport

    def _require_role(self, role: str) -> None:
        self._require_prepared()
        if self._role != role:
            raise LifecycleError(
                f"this engine has not joined as a {role} worker: call init_{role}_process_group() first"
            )

    def _require_link(self) -> Link:
        if self._link is None:
            raise LifecycleError("this rank has no peer")
        return self._link

    def _require_metadata(self, metadata: list[Any], expected: int) -> None:
        if len(metadata) != expected:
            raise ConfigurationError(
                f"metadata must hold one entry for each worker, policy ranks first: "
                f"expected {expected}, got {len(metadata)}"
            )
        for index, entry in enumerate(metadata):
            if not isinstance(entry, dict) or entry.get("engine") != self.transport_name:
                raise ConfigurationError(
                    f"metadata entry {index} was not made by a {self.transport_name} engine"
                )
            if entry["bucket_size"] != self.bucket_size:
                raise ConfigurationError(
                    f"metadata entry {index} has buckets of {entry['bucket_size']} bytes, "
                    f"this worker {self.bucket_size}: all workers need the same bucket_size"
                )


def _figures(stopwatch: Stopwatch, moved: WeightManifest | None = None, batches: int = 0) -> dict[str, float]:
    """Return what `refit_stats` gives: counts, and ``seconds_<phase>``."""
    seconds = {f"seconds_{phase}": value for phase, value in stopwatch.seconds().items()}
    counts = {"bytes": moved.nbytes, "tensors": len(moved)} if moved else {"bytes": 0, "tensors": 0}
    return {**counts, "batches": batches, **seconds}
