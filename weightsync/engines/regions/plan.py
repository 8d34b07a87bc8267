"""Who reads what in a refit by regions, from the tables of all ranks. No I/O.

Every rank makes the same plan from the same tables: nothing of it travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigurationError
from weightsync.layout.groups import Groups
from weightsync.layout.joining import join_tables
from weightsync.layout.pieces import ABSENT
from weightsync.layout.plan import ReshardPlan, make_plan
from weightsync.layout.rows import RowMaker, Rows
from weightsync.layout.tables import RankTable
from weightsync.tensors import ALIGNMENT, TensorSpec, WeightManifest
from weightsync.topology import RankId, Topology

Mask = npt.NDArray[np.bool_]

READABLE_RUN = 16 << 10
"""Bytes that a run must have to be read where it is; what is cut finer is packed by the sender first."""


@dataclass(frozen=True)
class RegionPlan:
    """What moves by regions, and who reads it from whom.

    Attributes:
        manifest: of the whole stream.
        policy: tables of the policy ranks.
        rollout: tables of the rollout ranks.
    """

    manifest: WeightManifest
    policy: tuple[RankTable, ...]
    rollout: tuple[RankTable, ...]

    @cached_property
    def whole(self) -> frozenset[str]:
        """The tensors that do not move by regions: some rank cannot, or they share a storage with such a one.

        A storage is filled by regions completely or not at all.
        """
        groups = Groups()
        for table in self.rollout:
            homes: dict[int, str] = {}
            for spec, slots in zip(self.manifest.tensors, table.slots, strict=True):
                for slot in slots:
                    groups.join(spec.name, homes.setdefault(slot, spec.name))
        found = {groups.root(name) for table in (*self.policy, *self.rollout) for name in table.whole}
        return frozenset(spec.name for spec in self.manifest.tensors if groups.root(spec.name) in found)

    @cached_property
    def rest(self) -> tuple[TensorSpec, ...]:
        """The same in the order of the stream."""
        return tuple(spec for spec in self.manifest.tensors if spec.name in self.whole)

    @cached_property
    def reshard(self) -> ReshardPlan:
        """The copies.

        Raises:
            ManifestError: no policy rank holds what a rollout rank stores.
        """
        return make_plan(
            join_tables("policy", self.manifest, self.policy, without=self.whole),
            join_tables("rollout", self.manifest, self.rollout, without=self.whole),
        )

    def rows(self, target: int, source: int | None = None) -> Rows:
        """Return what a rollout rank reads, of one policy rank or all, in the order of both ends."""
        return self._maker.rows(target, source)

    def readable(self, rows: Rows, sender: int, lent: Mask) -> Mask:
        """Return which rows of a sender are read where it has them; it packs the others.

        Args:
            rows: all of this sender.
            sender: policy rank.
            lent: which of its storages can be read, shape ``(storages,)``.
        """
        kinds = [storage.dtype for storage in self.policy[sender].storages]
        known = np.array(
            [self.dtypes.index(name) if name in self.dtypes else ABSENT for name in kinds], np.int64
        )
        as_sent = known[rows.source_storage] == rows.dtype
        found: Mask = (
            ((rows.count == 1) | (rows.nbytes >= READABLE_RUN)) & as_sent & lent[rows.source_storage]
        )
        return found

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those that `Rows.dtype` counts."""
        return self._maker.dtypes

    @property
    def keys(self) -> Mapping[str, int]:
        """Of the rollout side's storages, by name: they are filled in this order."""
        return self._maker.keys

    def senders(self, target: int) -> list[int]:
        """Return the policy ranks that a rollout rank reads from."""
        return [int(rank) for rank in np.flatnonzero(self.reshard.links[:, target])]

    def widened(self, topology: Topology, receivers: Sequence[int]) -> Topology:
        """Return the connections of the whole refit: those of the regions, and ``topology`` for the rest."""
        edges = set(topology.edges if self.rest else ())
        for rank in receivers:
            edges |= {(RankId("policy", sender), RankId("rollout", rank)) for sender in self.senders(rank)}
        # In one order on all ranks: each meets its peers one by one.
        return replace(topology, edges=tuple(sorted(edges)))

    @cached_property
    def moved(self) -> tuple[TensorSpec, ...]:
        """The tensors that move by regions, in the order of the stream."""
        return tuple(spec for spec in self.manifest.tensors if spec.name not in self.whole)

    @cached_property
    def _maker(self) -> RowMaker:
        return RowMaker(self.reshard, self.manifest, self.policy, self.rollout)


def require_tables(tables: Sequence[bytes]) -> tuple[RankTable, ...]:
    """Read the tables of one side.

    Raises:
        ConfigurationError: one is damaged, or some ranks have one and others not.
    """
    if not all(tables):
        lacking = [rank for rank, data in enumerate(tables) if not data]
        raise ConfigurationError(
            f"ranks {lacking[:8]} have told nothing of what they hold: the layout is asked of all workers or "
            "of none"
        )
    return tuple(RankTable.decode(data) for data in tables)


def aligned(nbytes: int) -> int:
    """Return a size rounded up to what buffers are aligned to."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
