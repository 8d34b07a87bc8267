"""An engine that moves regions where it can, and whole tensors in buckets where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from weightsync.config_sharding import SHARDINGS
from weightsync.engines.base import RankMemory
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.calls import not_prepared
from weightsync.engines.intake import Intake
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.metadata import WorkerMetadata
from weightsync.engines.receiver import BucketReceiver
from weightsync.engines.refit import Refit
from weightsync.engines.regions.borrowing import Borrower
from weightsync.engines.regions.intake import MADE_ONCE, RegionIntake
from weightsync.engines.regions.lending import Lender
from weightsync.engines.regions.plan import RegionPlan, require_tables
from weightsync.engines.regions.reading import OneSidedTransport
from weightsync.engines.regions.receiver import RegionReceiver
from weightsync.engines.regions.sender import RegionSender
from weightsync.engines.session import Session
from weightsync.engines.stats import Stopwatch
from weightsync.engines.stream import Weights
from weightsync.errors import ConfigurationError, LifecycleError
from weightsync.topology import RankId, Topology


class RegionEngine(BucketedCheckpointEngine):
    """A `BucketedCheckpointEngine` that has a `OneSidedTransport`.

    Args:
        bucket_size: bytes of each transfer buffer, at least 1 MiB.
        shard_weights: one of `SHARDINGS`: which tensors a rollout rank receives only its part of.
        shard_expert_weights: true is another name for ``shard_weights: experts``.
        common: keywords of `BucketedCheckpointEngine`.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        shard_weights: str = "none",
        shard_expert_weights: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(bucket_size, **common)
        self.shard_weights = chosen_sharding(shard_weights, shard_expert_weights)
        self.shard_expert_weights = self.shard_weights == "experts"
        self._connecting = Stopwatch()
        self._local: RankMemory | None = None
        self._lender: Lender | None = None
        self._borrower: Borrower | None = None
        self._plan: RegionPlan | None = None
        self._tables: tuple[bytes, ...] = ()
        self._whole_topology: Topology | None = None

    def use_memory(self, memory: RankMemory | None) -> None:
        """Learn, before `prepare`, what this rank holds or stores; `None`: tensors move whole.

        Raises:
            LifecycleError: a refit is running.
        """
        with self._calls.hold("use_memory"):
            self._forget()
            self._local = memory

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return who reads how many bytes of this rank, and what travels whole; `None` if nobody does."""
        plan, session = self._plan, self._session
        if plan is None or session is None or session.who is None or session.who.side != "policy":
            return None
        links = plan.reshard.links[session.who.rank].tolist()
        readers = {target: nbytes for target, nbytes in enumerate(links) if nbytes}
        return {"bytes_per_rollout_rank": readers, "whole": sorted(plan.whole)} if readers else None

    def connect_stats(self) -> dict[str, float]:
        """Return the seconds that connecting took for the plan, and to register what this rank has."""
        seconds = self._connecting.seconds()
        return {f"seconds_{phase}": seconds.get(phase, 0.0) for phase in ("plan", "register")}

    def take_memory(self) -> bytes:
        """Lend this rank's shards; returns its table."""
        self._forget()
        self._connecting = Stopwatch()
        transport = self._one_sided()
        if self._local is None:
            transport.lend(())  # what was lent before may be freed now
            return b""
        with self._connecting.phase("register"):
            self._lender = Lender(transport, self._local, self._memory.buffers[0].device)
        return self._local.table.encode()

    def _take_place(
        self,
        who: RankId,
        topology: Topology,
        entries: Sequence[WorkerMetadata],
        receivers: tuple[int, ...],
        *,
        late: bool = False,
    ) -> None:
        self._whole_topology = topology
        with self._connecting.phase("plan"):
            self._plan = None if late else self._plan_of(topology, entries)
            if self._plan is not None:
                topology = self._plan.widened(topology, receivers)
        if who.side == "rollout":
            self._lender = None
            if self._borrower is not None:
                self._borrower.forget_sources()
        super()._take_place(who, topology, entries, receivers, late=late)

    def _plan_of(self, topology: Topology, entries: Sequence[WorkerMetadata]) -> RegionPlan | None:
        """Return the plan of what all ranks have told; the last one, as long as that is the same."""
        tables = tuple(entry.table for entry in entries)
        if not any(tables) or self._local is None:
            return None
        if tables != self._tables or self._plan is None:
            train = topology.train_world_size
            policy, rollout = require_tables(tables[:train]), require_tables(tables[train:])
            self._plan = RegionPlan(self._local.manifest, policy, rollout)
            self._tables = tables
        return self._plan

    # One refit.

    async def _send(
        self, weights: Weights, session: Session, refit: Refit, lockstep: Lockstep
    ) -> dict[str, float]:
        plan = self._plan
        if plan is None:
            return await super()._send(weights, session, refit, lockstep)
        rest = _select(weights, [spec.name for spec in plan.rest])
        lender = self._require_lender()
        lender.stopwatch = refit.stopwatch
        links = list(session.targets.values())
        with refit.on(links):
            await refit.open(links, sending=bool(links))
            lender.take(self._shards_of(weights))
            regions = RegionSender(refit, plan, lender, self._readers(plan, session))
            await refit.waiter.run(regions.run)
            figures = refit.figures()
            if plan.rest:
                refit = replace(refit, topology=self._require_whole_topology())
                figures = await self._send_buckets(rest, self._bucket_links(session, refit), refit, lockstep)
        moved = {"bytes_lent": regions.bytes_lent, "bytes_packed": regions.bytes_packed}
        figures["bytes"] += regions.bytes_lent + regions.bytes_packed
        figures["bytes_moved"] += regions.bytes_lent + regions.bytes_packed
        figures["tensors"] += len(plan.moved)
        figures["batches"] += len(regions.outgoing.buckets)
        return {**MADE_ONCE, **figures, **moved}

    def _make_intake(self, session: Session, refit: Refit) -> Intake:
        plan = self._plan
        if plan is None:
            return super()._make_intake(session, refit)
        senders = plan.senders(refit.who.rank)
        borrower = self._require_borrower()
        borrower.stopwatch = refit.stopwatch
        regions = RegionReceiver(
            refit,
            plan,
            borrower,
            {rank: session.sources[RankId("policy", rank)] for rank in senders},
            manifest_check=self.manifest_check,
            before_writing=self.before_writing,
        )
        return RegionIntake(regions, self._buckets_of(session, refit, plan), in_place=self.writes_in_place)

    def _buckets_of(self, session: Session, refit: Refit, plan: RegionPlan) -> BucketReceiver | None:
        """Return what brings the tensors that travel whole, if there are any."""
        if not plan.rest:
            return None
        topology = self._require_whole_topology()
        sources = {rank: session.sources[rank] for rank in topology.sources(refit.who)}
        targets = {rank: session.targets[rank] for rank in topology.targets(refit.who)}
        return BucketReceiver(
            replace(refit, topology=topology),
            sources,
            targets,
            parts=self._memory.parts,
            manifest_check=partial(_require_rest, plan),
        )

    def _readers(self, plan: RegionPlan, session: Session) -> dict[int, Any]:
        """Return the links to those that read regions of this rank and take part."""
        if session.who is None:
            raise not_prepared()
        links = plan.reshard.links[session.who.rank]
        return {who.rank: link for who, link in session.targets.items() if links[who.rank]}

    def _bucket_links(self, session: Session, refit: Refit) -> list[Any]:
        return [session.targets[rank] for rank in refit.topology.targets(refit.who)]

    # Pieces.

    def _shards_of(self, weights: Weights) -> RankMemory:
        """Return what this rank's stream has now; one that never tells where its tensors are has nothing."""
        shards: RankMemory | None = getattr(weights, "shards", None)
        if shards is None and self._local is not None and not self._local.table.storages:
            return self._local
        if shards is None:
            raise LifecycleError("the weight stream of this policy rank has no shards, as it had before")
        return shards

    def _one_sided(self) -> OneSidedTransport:
        transport = self._memory.require()
        if not isinstance(transport, OneSidedTransport):
            raise ConfigurationError(
                f"{self.transport_name} cannot read a peer's memory: it moves whole tensors"
            )
        return cast(OneSidedTransport, transport)

    def _require_lender(self) -> Lender:
        if self._lender is None:
            raise not_prepared()
        return self._lender

    def _require_borrower(self) -> Borrower:
        if self._borrower is None:
            if self._local is None:
                raise not_prepared()
            self._borrower = Borrower(self._one_sided(), self._local, self._memory.buffers)
        return self._borrower

    def _require_whole_topology(self) -> Topology:
        if self._whole_topology is None:
            raise not_prepared()
        return self._whole_topology

    def _forget(self) -> None:
        self._lender = self._borrower = self._plan = None
        self._tables = ()

    def _release(self) -> None:
        if self._borrower is not None:
            self._borrower.release()
        self._lender = self._borrower = None
        super()._release()


def chosen_sharding(shard_weights: str, shard_expert_weights: bool) -> str:
    """Return which tensors are received in part.

    Raises:
        ConfigurationError: there is no such choice, or the two settings contradict each other.
    """
    if shard_weights not in SHARDINGS:
        raise ConfigurationError(
            f"shard_weights must be one of {', '.join(SHARDINGS)}, got {shard_weights!r}"
        )
    if not shard_expert_weights:
        return shard_weights
    if shard_weights not in {"none", "experts"}:
        raise ConfigurationError(
            f"shard_expert_weights: true means shard_weights: experts, but that is {shard_weights!r}: "
            "leave shard_expert_weights out"
        )
    return "experts"


def _select(weights: Weights, names: Sequence[str]) -> Weights:
    select = getattr(weights, "select", None)
    if select is None:
        raise LifecycleError(
            "this policy rank told of its shards, and its weight stream has none now: weight_stream() must "
            "return a stream of the same kind each time"
        )
    return cast(Weights, select(names))


def _require_rest(plan: RegionPlan, manifest: Any) -> None:
    """Check that what comes whole is what does not come by regions."""
    if tuple(manifest.tensors) != plan.rest:
        raise LifecycleError(
            f"{len(manifest.tensors)} tensors come whole, where {len(plan.rest)} do not move by regions"
        )
