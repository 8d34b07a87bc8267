"""How an engine finds its place in a process group: the topology, its peers, their metadata. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightsync.engines.metadata import WorkerMetadata, read_metadata
from weightsync.engines.transport import Peer, Place
from weightsync.errors import ConfigurationError
from weightsync.topology import AUTO, RankId, Topology, choose_topology, make_topology


@dataclass(frozen=True)
class TopologyChoice:
    """Which topology an engine is to have, among those that its transport can do.

    Attributes:
        transport_name: for messages.
        name: one of ``allowed``, or ``"auto"``.
        fan_out: of a tree.
        allowed: what the transport can do.
        why: it can do no others, for messages.

    Raises:
        ConfigurationError: the transport has no such topology, or ``fan_out`` is no whole number above 0.
    """

    transport_name: str
    name: str
    fan_out: int
    allowed: tuple[str, ...]
    why: str = ""

    def __post_init__(self) -> None:
        if self.name not in (AUTO, *self.allowed):
            because = f" ({self.why})" if self.why else ""
            raise ConfigurationError(
                f"{self.transport_name} has no topology {self.name!r}{because}; "
                f"write one of {', '.join((*self.allowed, AUTO))}"
            )
        if isinstance(self.fan_out, bool) or not isinstance(self.fan_out, int) or self.fan_out < 1:
            raise ConfigurationError(f"fan_out must be a whole number of at least 1, got {self.fan_out!r}")

    def of(self, train_world_size: int, rollout_world_size: int) -> Topology:
        """Return who sends to whom.

        Raises:
            ConfigurationError: it does not fit the world sizes.
        """
        make = partial(choose_topology, self.allowed)
        if self.name != AUTO:
            make = partial(make_topology, self.name)
        return make(
            train_world_size=train_world_size, rollout_world_size=rollout_world_size, fan_out=self.fan_out
        )

    def among(self, receivers: tuple[int, ...], train_world_size: int, rollout_world_size: int) -> Topology:
        """Return who sends to whom where only some rollout ranks take part.

        Raises:
            ConfigurationError: they are no rollout ranks in order, or it does not fit so many.
        """
        known = set(range(rollout_world_size))
        if not set(receivers) <= known or list(receivers) != sorted(set(receivers)):
            raise ConfigurationError(
                f"receivers must be rollout ranks below {rollout_world_size}, in order: {receivers}"
            )
        return self.of(train_world_size, len(receivers)).among(receivers, rollout_world_size)


def read_entries(
    metadata: list[Any], who: RankId, topology: Topology, own: WorkerMetadata, *, late: bool
) -> list[WorkerMetadata]:
    """Check the combined metadata list, as `who` is given it.

    Args:
        metadata: of all workers, policy ranks first; of the policy ranks alone for one that comes ``late``.
        who: this worker.
        topology: of the process group.
        own: what this worker's last `prepare` returned.
        late: whether the others have joined long before.

    Raises:
        ConfigurationError: they are not this engine's, or ``who`` is outside its world.
    """
    topology.require_rank(who)
    return read_metadata(
        metadata,
        expected=topology.train_world_size + (0 if late else topology.rollout_world_size),
        own_index=None if late else topology.index(who),
        own=own,
    )


def place_of(
    who: RankId, topology: Topology, entries: Sequence[WorkerMetadata], receivers: tuple[int, ...]
) -> Place:
    """Return where a worker stands among its peers; ``receivers`` are the rollout ranks that take part."""

    def peers(ranks: tuple[RankId, ...]) -> tuple[Peer, ...]:
        return tuple(Peer(rank, entries[topology.index(rank)].transport) for rank in ranks)

    return Place(
        who=who,
        train_world_size=topology.train_world_size,
        rollout_world_size=topology.rollout_world_size,
        receivers=receivers,
        sources=peers(topology.sources(who)),
        targets=peers(topology.targets(who)),
    )
