"""A policy rank's shards, lent to its readers from one refit to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.engines.base import RankMemory
from weightsync.engines.regions.outgoing import Outgoing, PackedBucket, Packing
from weightsync.engines.regions.plan import Mask, RegionPlan
from weightsync.engines.regions.reading import OneSidedTransport
from weightsync.engines.stats import Stopwatch
from weightsync.errors import ManifestError
from weightsync.layout.regions import Ints
from weightsync.layout.tables import RankTable, Storage
from weightsync.tensors import dtype_from_name


class Lender:
    """Keeps what peers may read registered, and what follows from where it is.

    Args:
        transport: with which it is registered.
        memory: of this rank.
        device: what can be lent is there; the rest is packed.
    """

    def __init__(self, transport: OneSidedTransport, memory: RankMemory, device: torch.device) -> None:
        self.stopwatch = Stopwatch()
        """Of the present refit: counts what is made for this and later ones: plan, register, prepare."""
        self._transport = transport
        self._device = device
        self.table: RankTable = memory.table
        self._flats: list[torch.Tensor | None] = []
        self._addresses: Ints = np.empty(0, np.int64)
        self._places: list[int] = []
        """Where all storages are, also those that cannot be lent: packing has views of both."""
        self._keys: bytes | None = b""
        self._outgoing: tuple[RegionPlan, tuple[tuple[int, ...], bytes], Outgoing] | None = None
        self._packings: dict[tuple[int, int], Packing] = {}
        self.take(memory)
        self._keys = b""

    def take(self, memory: RankMemory) -> None:
        """Look where the shards are now; what has moved is lent anew.

        Raises:
            ManifestError: they are other shards than this rank has told of.
        """
        if memory.table is not self.table and memory.table != self.table:
            raise ManifestError(
                "this rank's weights have other names, shapes, dtypes or shards than when the engines were "
                f"connected ({_first_change(self.table, memory.table)}): call shutdown() and "
                "init_communicator()",
                side="policy",
            )
        flats = [memory.storage(index) for index in range(len(self.table.storages))]
        for storage, flat in zip(self.table.storages, flats, strict=True):
            require_as_told(storage, flat, "policy")
        addresses = np.array([self._address(flat) for flat in flats], np.int64)
        places = [0 if flat is None else flat.data_ptr() for flat in flats]
        self._flats = flats
        if places != self._places:
            self._places = places
            self._packings.clear()
        if not np.array_equal(addresses, self._addresses):
            lendable = [flat.detach() for flat in flats if flat is not None and self._address(flat)]
            with self.stopwatch.phase("register"):
                self._transport.lend(lendable)
            self._addresses, self._keys = addresses, None  # now: what failed must not look as if it were lent

    @property
    def addresses(self) -> Ints:
        """Where each storage can be read, 0 for those that cannot; shape ``(storages,)``."""
        return self._addresses

    @property
    def lent(self) -> Mask:
        """Which storages can be read where they are, shape ``(storages,)``."""
        lent: Mask = self._addresses != 0
        return lent

    def keys(self) -> bytes:
        """Return what readers need besides what they were told when they were connected."""
        if self._keys is None:
            self._keys = self._transport.keys()
        return self._keys

    def storage(self, index: int) -> torch.Tensor:
        """Return a storage as it was taken last, flat.

        Raises:
            ManifestError: there is none.
        """
        flat = self._flats[index]
        if flat is None:
            raise ManifestError("a policy rank has no memory of a shard that it holds", side="policy")
        return flat.detach()

    def outgoing(self, plan: RegionPlan, sender: int, targets: Sequence[int], bucket_size: int) -> Outgoing:
        """Return what some rollout ranks get of this one."""
        key = tuple(targets), self.lent.tobytes()
        if self._outgoing is None or self._outgoing[0] is not plan or self._outgoing[1] != key:
            self._packings.clear()
            with self.stopwatch.phase("plan"):
                made = Outgoing.of(plan, sender, targets, self.lent, bucket_size)
            self._outgoing = plan, key, made
        return self._outgoing[2]

    def pack(
        self, seq: int, slot: int, bucket: PackedBucket, buffer: torch.Tensor, dtypes: Sequence[str]
    ) -> None:
        """Fill a buffer with a bucket of the last `outgoing`."""
        if (seq, slot) not in self._packings:
            with self.stopwatch.phase("prepare"):
                self._packings[seq, slot] = Packing(bucket, buffer, self.storage, dtypes)
        self._packings[seq, slot].run()

    def _address(self, flat: torch.Tensor | None) -> int:
        """Return the address of what can be lent; 0 for what has no bytes, or is on another device."""
        if flat is None or not flat.numel() or flat.device != self._device:
            return 0
        return flat.data_ptr()


def require_as_told(storage: Storage, flat: torch.Tensor | None, side: str) -> None:
    """Check that memory is as large as the rest of the job was told: reads and writes reach that far.

    Raises:
        ManifestError: it is not.
    """
    if flat is not None and (
        flat.numel() != storage.numel
        or flat.dtype != dtype_from_name(storage.dtype)
        or not flat.is_contiguous()
    ):
        raise ManifestError(
            f"this rank's memory of {storage.name!r:.200} has {flat.numel()} elements of {flat.dtype}, and "
            f"was told to have {storage.numel} of {storage.dtype}: call shutdown() and init_communicator()",
            side=side,
        )


def _first_change(was: RankTable, now: RankTable) -> str:
    """Say where two tables of one rank differ first."""
    for before, after in zip(was.storages, now.storages, strict=False):
        if before != after:
            shapes = f"{before.dtype}{list(before.shape)}, now {after.dtype}{list(after.shape)}"
            same = before.name == after.name
            return f"{before.name!r} was {shapes}" if same else f"{before.name!r} is now {after.name!r}"
    if len(was.storages) != len(now.storages):
        return f"{len(was.storages)} shards, now {len(now.storages)}"
    return "the same shards hold other regions, or bear other names"
