"""Which rank sends to which: pure functions of the two world sizes. No I/O.

======= ================================================ ====================================================
pairs   policy *i* to rollout *i*                        at least as many policy as rollout workers
star    policy 0 to every rollout rank                   what a broadcast does
ring    policy 0 to rollout 0 to rollout 1 to ...        each rank sends once, and loads meanwhile
tree    policy 0, and each rank, to ``fan_out`` others   as the ring, with fewer hops
stripes every policy rank to every rollout rank          each policy rank sends its share of the bytes
======= ================================================ ====================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weightsync.errors import ConfigurationError

AUTO = "auto"
DEFAULT_FAN_OUT = 2


class RankId(NamedTuple):
    """One rank of one side, ``"policy"`` or ``"rollout"``."""

    side: str
    rank: int

    def __str__(self) -> str:
        return f"{self.side} rank {self.rank}"


Edge = tuple[RankId, RankId]
"""From a sending rank to a receiving one."""


@dataclass(frozen=True)
class Topology:
    """Who sends to whom in one refit.

    Attributes:
        name: one of `TOPOLOGIES`.
        train_world_size: number of policy workers.
        rollout_world_size: number of rollout workers, over all engines.
        edges: every connection, senders' ranks in order. Each rollout rank that takes part is at the end of
            at least one.
        owners: number of shares that the stream is cut into. With 1, every policy rank that sends sends all
            of it; with more, policy rank *i* sends share *i* to each rollout rank.
        reason: why `AUTO` chose it; else empty.
    """

    name: str
    train_world_size: int
    rollout_world_size: int
    edges: tuple[Edge, ...]
    owners: int = 1
    reason: str = ""
    _sources: dict[RankId, list[RankId]] = field(init=False, repr=False, compare=False)
    _targets: dict[RankId, list[RankId]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sources, targets = defaultdict(list), defaultdict(list)
        for sender, receiver in self.edges:
            targets[sender].append(receiver)
            sources[receiver].append(sender)
        object.__setattr__(self, "_sources", dict(sources))
        object.__setattr__(self, "_targets", dict(targets))

    def among(self, receivers: Sequence[int], rollout_world_size: int) -> Topology:
        """Return the same connections with some rollout ranks of a larger world in place of all of this one.

        Args:
            receivers: the rollout ranks that take part, as many as this topology has, in order.
            rollout_world_size: of the larger world.
        """
        edges = tuple(
            (_renamed(sender, receivers), _renamed(receiver, receivers)) for sender, receiver in self.edges
        )
        return replace(self, rollout_world_size=rollout_world_size, edges=edges)

    def sources(self, who: RankId) -> tuple[RankId, ...]:
        """Return the ranks that ``who`` receives from; none for one that takes no part."""
        self.require_rank(who)
        return tuple(self._sources.get(who, ()))

    def targets(self, who: RankId) -> tuple[RankId, ...]:
        """Return the ranks that ``who`` sends to, or forwards to; none for one that only keeps in step."""
        self.require_rank(who)
        return tuple(self._targets.get(who, ()))

    def index(self, who: RankId) -> int:
        """Return a rank's place in a list of all workers, policy ranks first."""
        return who.rank if who.side == "policy" else self.train_world_size + who.rank

    def share(self, policy_rank: int) -> int | None:
        """Return the share of the stream that a policy rank sends; `None` for one that sends nothing."""
        if not self.targets(RankId("policy", policy_rank)):
            return None
        return policy_rank if self.owners > 1 else 0

    def require_rank(self, who: RankId) -> None:
        """Check that a rank is in its world.

        Raises:
            ConfigurationError: it is not.
        """
        size = self.train_world_size if who.side == "policy" else self.rollout_world_size
        if not 0 <= who.rank < size:
            raise ConfigurationError(f"{who} is outside its world of {size}")

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: {self.train_world_size} policy to {self.rollout_world_size} rollout{because}"


def make_topology(
    name: str, *, train_world_size: int, rollout_world_size: int, fan_out: int = DEFAULT_FAN_OUT
) -> Topology:
    """Return the connections of a topology.

    Args:
        name: one of `TOPOLOGIES`.
        train_world_size: number of policy workers, at least 1.
        rollout_world_size: number of rollout workers, at least 1.
        fan_out: of a tree: how many ranks each rank sends to, at least 1.

    Raises:
        ConfigurationError: no such topology, or it does not fit the world sizes.
    """
    if name not in TOPOLOGIES:
        raise ConfigurationError(f"unknown topology {name!r}; write one of {', '.join(TOPOLOGIES)}, or auto")
    if fan_out < 1:
        raise ConfigurationError(f"fan_out must be at least 1, got {fan_out}")
    require_world_sizes(train_world_size, rollout_world_size)
    if name == "pairs":
        _require_pairs(train_world_size, rollout_world_size)
    edges = _EDGES[name](train_world_size, rollout_world_size, fan_out)
    owners = train_world_size if name == "stripes" else 1
    return Topology(name, train_world_size, rollout_world_size, tuple(edges), owners)


def choose_topology(
    allowed: Sequence[str],
    *,
    train_world_size: int,
    rollout_world_size: int,
    fan_out: int = DEFAULT_FAN_OUT,
) -> Topology:
    """Return the topology that suits the world sizes best; its ``reason`` says why.

    Args:
        allowed: the topologies that the transport can do.
        train_world_size: as for `make_topology`.
        rollout_world_size: as for `make_topology`.
        fan_out: as for `make_topology`.

    Raises:
        ConfigurationError: none of them fits, or a world size below 1.
    """
    require_world_sizes(train_world_size, rollout_world_size)
    name, reason = _choice(allowed, train_world_size, rollout_world_size)
    chosen = make_topology(
        name, train_world_size=train_world_size, rollout_world_size=rollout_world_size, fan_out=fan_out
    )
    return Topology(
        chosen.name, train_world_size, rollout_world_size, chosen.edges, chosen.owners, f"auto: {reason}"
    )


def require_world_sizes(train_world_size: int, rollout_world_size: int) -> None:
    """Check that both sides have workers.

    Raises:
        ConfigurationError: a world size below 1.
    """
    if train_world_size < 1 or rollout_world_size < 1:
        raise ConfigurationError(
            f"a refit needs at least one policy and one rollout worker, "
            f"got train_world_size={train_world_size} and rollout_world_size={rollout_world_size}"
        )


def _choice(allowed: Sequence[str], train: int, rollout: int) -> tuple[str, str]:
    wishes = [
        ("pairs", rollout <= train, "every rollout rank has a policy rank of its own"),
        ("stripes", 1 < train < rollout <= 2 * train, "with few more rollout ranks, all policy ranks send"),
        ("tree", rollout > 2, "with many more rollout ranks, they send on what they have"),
        ("star", True, "policy rank 0 reaches them all at once"),
        ("tree", True, "rollout ranks send on what they have"),
        ("stripes", True, "all policy ranks send"),
        ("ring", True, "rollout ranks send on what they have"),
    ]
    for name, fits, reason in wishes:
        if fits and name in allowed:
            return name, reason if len(allowed) > 1 else "the only one that this transport has"
    raise ConfigurationError(
        f"none of {', '.join(allowed)} fits {train} policy and {rollout} rollout workers: "
        "add policy workers or use fewer rollout workers"
    )


def _renamed(who: RankId, receivers: Sequence[int]) -> RankId:
    return who if who.side == "policy" else RankId(who.side, receivers[who.rank])


def _policy(rank: int) -> RankId:
    return RankId("policy", rank)


def _rollout(rank: int) -> RankId:
    return RankId("rollout", rank)


def _pair_edges(train: int, rollout: int, fan_out: int) -> Iterable[Edge]:
    return ((_policy(rank), _rollout(rank)) for rank in range(rollout))


def _star_edges(train: int, rollout: int, fan_out: int) -> Iterable[Edge]:
    return ((_policy(0), _rollout(rank)) for rank in range(rollout))


def _ring_edges(train: int, rollout: int, fan_out: int) -> Iterable[Edge]:
    return _tree_edges(train, rollout, 1)


def _tree_edges(train: int, rollout: int, fan_out: int) -> Iterable[Edge]:
    # Numbered by levels: policy rank 0 is node 0, rollout rank r is node r + 1 below node r // fan_out.
    parents = (rank // fan_out for rank in range(rollout))
    return ((_rollout(node - 1) if node else _policy(0), _rollout(rank)) for rank, node in enumerate(parents))


def _stripe_edges(train: int, rollout: int, fan_out: int) -> Iterable[Edge]:
    return ((_policy(sender), _rollout(rank)) for sender in range(train) for rank in range(rollout))


_EDGES: dict[str, Callable[[int, int, int], Iterable[Edge]]] = {
    "pairs": _pair_edges,
    "star": _star_edges,
    "ring": _ring_edges,
    "tree": _tree_edges,
    "stripes": _stripe_edges,
}
TOPOLOGIES = tuple(_EDGES)
"""The names that a configuration may select, beside `AUTO`."""


def _require_pairs(train_world_size: int, rollout_world_size: int) -> None:
    if rollout_world_size > train_world_size:
        raise ConfigurationError(
            f"the paired topology needs at least as many policy workers as rollout workers, got "
            f"{train_world_size} policy and {rollout_world_size} rollout workers: add policy workers, use "
            f"fewer rollout workers, or write topology: auto"
        )
