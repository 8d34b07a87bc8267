"""What all built-in transports share: one engine around a `BucketTransport`.

Here are its refits and their clean-up. `member` has the rest of its life, `joining` finds its place among its
peers, `session` holds the links to them; `sender` and `receiver` are the two halves of a refit. A transport
is a subclass that says which `BucketTransport` it uses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import torch

from weightsync.control import Link
from weightsync.engines.calls import not_prepared, require_joined
from weightsync.engines.intake import Intake
from weightsync.engines.lockstep import Lockstep, make_lockstep
from weightsync.engines.member import MemberEngine
from weightsync.engines.receiver import BucketReceiver
from weightsync.engines.refit import Refit
from weightsync.engines.sampling import ChunkChecks
from weightsync.engines.sender import BucketSender, drain_weights
from weightsync.engines.session import Session
from weightsync.engines.stream import Weights, closing_stream
from weightsync.engines.telling import tell_unmet
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget
from weightsync.errors import WeightSyncError


class BucketedCheckpointEngine(MemberEngine):
    """An engine that sends buckets through a `BucketTransport`. Arguments as for `MemberEngine`."""

    lacks: Mapping[str, str] = {"latecomers": "buckets are kept until they are loaded, and no longer"}

    def __init__(self, bucket_size: int, **common: Any) -> None:
        super().__init__(bucket_size, **common)
        self._stats: dict[str, float] = {}
        self._arrived: Mapping[str, int] = {}

    # One refit.

    def open_refit(self, *, epoch: int, version: int, receivers: Sequence[int] | None = None) -> None:
        """Name the next refit; peers that name another are not answered.

        Raises:
            ConfigurationError: the topology does not fit so many receivers.
            LifecycleError: the receivers are others than last time, and a refit is running.
        """
        session = self._session
        if session is not None and session.who is not None and not session.is_late:
            self._choose(session, session.who, None if receivers is None else tuple(receivers))
        self._next = (epoch, version)

    async def send_weights(self, weights: Weights) -> None:
        """Send a weight stream, or this rank's share of it; ranks without a target keep theirs in step.

        Returns once every receiver has loaded everything. The generator is consumed once and closed.

        Raises:
            WeightSyncError: with peer, phase, tensor, bucket and bytes so far where they are known.
        """
        with closing_stream(weights), self._calls.hold("send_weights"):
            session, refit = self._begin_refit("policy")
            # Another rank may have to wait for its receiver, first to come and then to take a bucket.
            patience_s = self._deadlines.connect_s + self._deadlines.stall_s
            lockstep = make_lockstep(
                refit.who.rank, session.step_links, self._waiter, refit.budget, patience_s
            )
            with session.saying_drops():
                try:
                    await lockstep.begin(refit.meet)
                    self._stats = await self._send(weights, session, refit, lockstep)
                except BaseException as error:
                    lockstep.stop(refit.sign(error))
                    refit.tell_unmet(error)
                    raise
                finally:
                    lockstep.end()

    async def _send(
        self, weights: Weights, session: Session, refit: Refit, lockstep: Lockstep
    ) -> dict[str, float]:
        links = list(session.targets.values())
        if not links:
            return await self._send_buckets(weights, links, refit, lockstep)
        with refit.on(links):
            await refit.open(links, sending=True)
            return await self._send_buckets(weights, links, refit, lockstep)

    async def _send_buckets(
        self, weights: Weights, links: list[Link], refit: Refit, lockstep: Lockstep
    ) -> dict[str, float]:
        """Send a stream, or this rank's share of it; a rank without a share keeps in step."""
        share = refit.topology.share(refit.who.rank)
        if share is None:
            await drain_weights(weights, lockstep, refit)
            return refit.figures()
        sender = BucketSender(refit, links, share, lockstep)
        sent = await sender.send(weights)
        return refit.figures(sent, sender.buckets_sent, sender.bytes_sent)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of ``(name, tensor)``; a tensor is valid until the next batch is asked for.

        Raises:
            WeightSyncError: a sender failed or was lost, or what came is not what was promised.
        """
        with self._calls.hold("receive_weight_batches"):
            session, refit = self._begin_refit("rollout")
            intake = self._make_intake(session, refit)
            links = session.links
            with session.saying_drops(), refit.on(links, drain=partial(self._memory.drain, intake)):
                try:
                    await refit.open(links, sending=bool(session.targets))
                except BaseException as error:
                    refit.tell_unmet(error)
                    raise
                async with aclosing(intake.batches()) as batches:
                    async for batch in batches:
                        self._arrived = intake.digests
                        yield batch
                        del batch  # a merged tensor owns its memory: let it go before the next one is made
            self._stats = intake.figures()

    def _make_intake(self, session: Session, refit: Refit) -> Intake:
        """Return what brings the batches of a refit."""
        return BucketReceiver(
            refit,
            session.sources,
            session.targets,
            parts=self._memory.parts,
            manifest_check=self.manifest_check,
        )

    def arrived_digest(self, name: str) -> int | None:
        """Return what a tensor of the current batch has digested to, where it came in one checked piece."""
        return self._arrived.get(name)

    def abort_refit(self, error: BaseException) -> None:
        """Tell the peers why this side failed; they raise it with its traceback.

        Before this side has begun the refit that `open_refit` named, it tells those peers that wait for it.
        """
        session = self._session
        if session is None:
            return
        if isinstance(error, WeightSyncError):
            error.with_context(**session.who._asdict() if session.who is not None else {})
        if self._next[0] is None or self._calls.holder is not None:
            session.abort(error)
            return
        with self._calls.hold("abort_refit"):
            (epoch, version), self._next = self._next, (None, None)
            tell_unmet(session.links, error, epoch=epoch, version=version)

    def refit_stats(self) -> dict[str, float]:
        """Return the last complete refit's bytes, tensors, batches and ``seconds_<phase>``."""
        return dict(self._stats)

    # Pieces.

    def _begin_refit(self, side: str) -> tuple[Session, Refit]:
        session, transport = self._prepared()
        require_joined(session.who, side)
        (epoch, version), self._next = self._next, (None, None)
        return session, self._refit_of(session, transport, epoch, version)

    def _refit_of(
        self, session: Session, transport: BucketTransport, epoch: int | None, version: int | None
    ) -> Refit:
        if session.who is None or session.topology is None:
            raise not_prepared()
        return Refit(
            who=session.who,
            topology=session.topology,
            epoch=None if session.is_late else epoch,
            version=version,
            transport=transport,
            buffers=self._memory.buffers,
            waiter=self._waiter,
            watch=session.watch,
            deadlines=self._deadlines,
            checks=ChunkChecks(self._verify),
            poison_released=self._poison_released,
            budget=Budget(self._deadlines.total_s),
            unmet=session.links,
            is_late=session.is_late,
        )
