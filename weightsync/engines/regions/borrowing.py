"""A rollout rank's memory and its prepared reads, kept from one refit to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.engines.base import RankMemory
from weightsync.engines.buffers import allocate_bucket
from weightsync.engines.regions.incoming import Batch, Incoming, packed_spans, spans
from weightsync.engines.regions.lending import require_as_told
from weightsync.engines.regions.plan import Mask, RegionPlan
from weightsync.engines.regions.reading import OneSidedTransport, Reading, Spans
from weightsync.engines.stats import Stopwatch
from weightsync.layout.regions import Ints
from weightsync.layout.tables import RankTable
from weightsync.tensors import dtype_from_name
from weightsync.topology import RankId


@dataclass(frozen=True)
class Place:
    """Where a batch goes: addresses of its storages, and the buffer of those that are handed over."""

    base: Ints
    """By storage of the table; 0 for those of other batches."""
    buffer: torch.Tensor


class Borrower:
    """Keeps what is read into registered, and reads prepared, as long as both ends stay where they are.

    Args:
        transport: with which it reads.
        memory: of this rank.
        buffers: the transfer buffers.
    """

    def __init__(
        self, transport: OneSidedTransport, memory: RankMemory, buffers: Sequence[torch.Tensor]
    ) -> None:
        self.stopwatch = Stopwatch()
        """Of the present refit: counts what is made for this and later ones: plan, register, prepare."""
        self._transport = transport
        self._memory = memory
        self._buffers = list(buffers)
        self._large: torch.Tensor | None = None
        self._flats: list[torch.Tensor | None] = []
        self._base: Ints = np.empty(0, np.int64)
        self._lent: list[tuple[int, int]] = []
        self._incoming: tuple[RegionPlan, Hashable, Incoming] | None = None
        self._readings: dict[Hashable, Reading] = {}
        self._sources: dict[int, tuple[bytes, bytes]] = {}

    @property
    def table(self) -> RankTable:
        """Of this rank."""
        return self._memory.table

    def take(self, *, in_place: bool) -> None:
        """Look where this rank's storages are now; without ``in_place`` all are handed over."""
        device = self._buffers[0].device
        flats: list[torch.Tensor | None] = []
        for index, storage in enumerate(self.table.storages):
            flat = self._memory.storage(index) if in_place and storage.numel else None
            require_as_told(storage, flat, "rollout")
            flats.append(flat.detach() if flat is not None and flat.device == device else None)
        base = np.array([0 if flat is None else flat.data_ptr() for flat in flats], np.int64)
        self._flats = flats
        if not np.array_equal(base, self._base):
            self._base = base
            self._forget()

    @property
    def writes_in_place(self) -> bool:
        """Whether anything is written into memory that is served."""
        return bool(self.in_place.any())

    @property
    def in_place(self) -> Mask:
        """Which storages are written in place, shape ``(storages,)``."""
        mask: Mask = self._base != 0
        return mask

    def learn(self, sender: int, addresses: bytes, keys: bytes) -> None:
        """Take in where a policy rank's shards are now."""
        if keys:
            # Also what is known: the connection may have been made anew, with what the peer said at first.
            self._transport.learn_keys(RankId("policy", sender), keys)
        if self._sources.get(sender) != (addresses, keys):
            self._sources[sender] = addresses, keys
            self._forget()

    def forget_sources(self) -> None:
        """Take in anew where shards are: peers were met again, and known only by what they said at first."""
        self._sources.clear()
        self._forget()

    def addresses(self, sender: int) -> Ints:
        """Return where a policy rank lends each of its storages, 0 where it does not."""
        return np.frombuffer(self._sources[sender][0], np.int64)

    def incoming(self, plan: RegionPlan, target: int, senders: Sequence[int], bucket_size: int) -> Incoming:
        """Return what is read from these policy ranks, and register what it is read into."""
        lent = {sender: self.addresses(sender) != 0 for sender in senders}
        key = target, self.in_place.tobytes(), tuple((s, m.tobytes()) for s, m in lent.items())
        if self._incoming is None or self._incoming[0] is not plan or self._incoming[1] != key:
            self._forget()
            with self.stopwatch.phase("plan"):
                self._incoming = plan, key, Incoming.of(plan, target, lent, self.in_place, bucket_size)
        incoming = self._incoming[2]
        self._lend(incoming, bucket_size)
        return incoming

    def place(self, batch: Batch, slot: int) -> Place:
        """Return where a batch goes, that is handed over in a buffer."""
        large = batch.buffer_bytes > self._buffers[slot].numel()
        buffer = self._large if large and self._large is not None else self._buffers[slot]
        base = np.zeros_like(self._base)
        base[batch.storages] = self._base[batch.storages]
        for index, offset in batch.handed_over.items():
            base[index] = buffer.data_ptr() + offset
        return Place(base, buffer)

    def parameters(self, batch: Batch, place: Place) -> list[tuple[str, torch.Tensor]]:
        """Return what a batch hands over, by name."""
        found = []
        for index, offset in batch.handed_over.items():
            storage = self.table.storages[index]
            data = place.buffer[offset : offset + storage.nbytes]
            found.append((storage.name, data.view(dtype_from_name(storage.dtype)).view(storage.shape)))
        return found

    def target(self, index: int, batch: Batch, place: Place) -> torch.Tensor:
        """Return the memory of a storage in a batch, flat uint8."""
        flat = self._flats[index]
        if flat is not None:
            return flat.view(torch.uint8)
        start = batch.handed_over[index]
        return place.buffer[start : start + self.table.storages[index].nbytes]

    def read_lent(self, incoming: Incoming, number: int, sender: int, place: Place) -> Reading:
        """Prepare the read of what a policy rank lends for a batch; once for each buffer."""
        rows = incoming.lent[sender].select(incoming.batches[number].lent[sender])
        key = "lent", number, sender, place.buffer.data_ptr()

        def make() -> Spans:
            remote = self.addresses(sender)[rows.source_storage] + rows.source_offset
            return spans(rows, remote, place.base[rows.target_storage] + rows.target_offset)

        return self._reading(key, sender, make)

    def read_packed(
        self, incoming: Incoming, sender: int, part: slice, remote: Ints, place: Place
    ) -> Reading:
        """Prepare the read of some rows that a policy rank has packed, at these addresses."""
        rows = incoming.packed[sender].select(part)
        key = "packed", sender, part.start, part.stop, remote.tobytes(), place.buffer.data_ptr()

        def make() -> Spans:
            return packed_spans(rows, remote, place.base[rows.target_storage] + rows.target_offset)

        return self._reading(key, sender, make)

    def release(self) -> None:
        """Let go of everything that is kept."""
        self._forget()
        self._large = None
        self._lent = []

    def _reading(self, key: Hashable, sender: int, make: Callable[[], Spans]) -> Reading:
        known = self._readings.get(key)
        if known is None or known.is_released:
            with self.stopwatch.phase("prepare"):
                known = self._transport.prepare_read(RankId("policy", sender), make())
            self._readings[key] = known
        return known

    def _forget(self) -> None:
        for reading in self._readings.values():
            reading.release()
        self._readings.clear()

    def _lend(self, incoming: Incoming, bucket_size: int) -> None:
        """Register the memory that is read into, beside the transfer buffers."""
        if incoming.largest > bucket_size and (self._large is None or self._large.numel() < incoming.largest):
            self._large = allocate_bucket(incoming.largest, self._buffers[0].device)
        memory = [flat for flat in self._flats if flat is not None]
        if self._large is not None:
            memory.append(self._large)
        wanted = [(flat.data_ptr(), flat.numel() * flat.element_size()) for flat in memory]
        if wanted != self._lent:
            with self.stopwatch.phase("register"):
                self._transport.lend(memory)
            self._lent = wanted
