"""The IPC checkpoint engine: workers of one host, and the receivers read the senders' buckets where they are.

A sender packs into memory that its peers have mapped, and names the bucket on the control channel; receivers
load from the sender's own pages and then release them. No byte is copied on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from weightsync.control import Bucket
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.buffers import require_device
from weightsync.engines.cuda_ipc import CudaAddress, CudaBlock, MappedCudaBlock
from weightsync.engines.descriptions import (
    describe,
    read_description,
    read_payload,
    require_alike,
    require_fits,
    write_payload,
)
from weightsync.engines.shared_memory import Address, Home, MappedBlock, SharedBlock
from weightsync.engines.transport import SLOTS, BucketTransport, Check, Peer, Place
from weightsync.errors import LifecycleError
from weightsync.topology import RankId

__all__ = ["IPCCheckpointEngine", "IpcTransport"]

ONE_HOST = "shared memory ends at the host: use nixl for workers on several hosts"
_AnyAddress = Address | CudaAddress


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `IpcTransport.describe` tells."""

    home: Home
    device: str
    slots: list[_AnyAddress]


class IpcTransport(BucketTransport):
    """Buckets in memory that all workers of a host share.

    A receiver's own buffers are never touched, so that they take no memory on the CPU. What it has mapped
    stays mapped until `connect` names other buffers, or until `release`.

    Args:
        device: of the transfer buffers, alike on all workers.
    """

    in_place = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home = Home.here()
        self._bucket_size = 0
        self._blocks: list[SharedBlock | CudaBlock] = []
        self._sources: dict[RankId, _Described] = {}
        self._mapped: dict[str, MappedBlock | MappedCudaBlock] = {}
        """By the address's token."""

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make two buffers; on the CPU, without any page as yet."""
        self._bucket_size = bucket_size
        while len(self._blocks) < SLOTS:
            self._blocks.append(self._new_block())
        return [block.tensor for block in self._blocks[:SLOTS]]

    def extend(self) -> torch.Tensor:
        """Make one more buffer, to be filled soon."""
        if not self._blocks:
            raise LifecycleError("this transport has no buffers: allocate them first")
        block = self._new_block()
        self._blocks.append(block)
        block.touch()
        return block.tensor

    def describe(self) -> dict[str, Any]:
        """Return where this worker is, and where the first two buffers are."""
        slots: list[_AnyAddress] = [block.address for block in self._blocks[:SLOTS]]
        return describe(_Described(self._home, self._device.type, slots))

    def connect(self, place: Place) -> None:
        """Map the buffers of the sources.

        Raises:
            ConfigurationError: a peer's description is damaged, or its memory cannot be mapped from here.
            PeerLostError: a source has died.
        """
        self.disconnect()
        for peer in place.targets:
            self._read(peer)
        sources = {peer.who: self._read(peer) for peer in place.sources}
        self._unmap_all_but(slot.token for source in sources.values() for slot in source.slots)
        for who, source in sources.items():
            for slot in source.slots:
                self._map(slot, source.home, who)
        self._sources = sources

    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Let a sender's pages exist, so that it does not pack into missing ones."""
        if sending:
            for block in self._blocks:
                block.touch()

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Return the address of a buffer that `describe` has not told of."""
        return b"" if slot < SLOTS else write_payload(self._blocks[slot].address)

    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Return the source's own memory, at once."""
        described = self._sources.get(source)
        if described is None:
            raise LifecycleError(f"IPC is not connected to {source}")
        known = bucket.slot < len(described.slots)
        address = described.slots[bucket.slot] if known else read_payload(bucket, _AnyAddress)
        require_fits(bucket, address.nbytes)
        return self._map(address, described.home, source).read()[: bucket.nbytes]

    def shut(self) -> None:
        """Nothing to do: nothing is under way."""

    def disconnect(self) -> None:
        """Leave the peers; what is mapped waits for their return."""
        self._sources = {}

    def release(self) -> None:
        """Unmap the peers' buffers and free the own ones."""
        self.disconnect()
        self._unmap_all_but(())
        while self._blocks:
            self._blocks.pop().free()

    def close(self) -> None:
        """Release; there is nothing else."""
        self.release()

    def _new_block(self) -> SharedBlock | CudaBlock:
        if self._device.type == "cuda":
            return CudaBlock(self._bucket_size, self._device)
        return SharedBlock(self._bucket_size)

    def _read(self, peer: Peer) -> _Described:
        described = read_description(peer, _Described)
        require_alike(peer, "device", described.device, self._device.type)
        self._home.require_common(described.home, str(peer.who))
        return described

    def _map(self, address: _AnyAddress, home: Home, owner: RankId) -> MappedBlock | MappedCudaBlock:
        mapped = self._mapped.get(address.token)
        if mapped is None:
            if isinstance(address, CudaAddress):
                mapped = MappedCudaBlock(address, self._device, str(owner))
            else:
                mapped = MappedBlock(address, home, str(owner))
            self._mapped[address.token] = mapped
        return mapped

    def _unmap_all_but(self, tokens: Iterable[str]) -> None:
        for token in self._mapped.keys() - set(tokens):
            self._mapped.pop(token).free()


class IPCCheckpointEngine(BucketedCheckpointEngine):
    """Workers of one host, through shared memory on the CPU and CUDA IPC on a GPU.

    Args:
        bucket_size: bytes of each of a sender's two transfer buffers, at least 1 MiB.
        device: ``"cuda"`` or ``"cpu"``: where the buffers are. With ``"cuda"`` each receiver must be able to
            read the sender's GPU: the same one, or one with peer access. This has not run on a GPU yet.
        common: keywords of `BucketedCheckpointEngine`.
    """

    transport_name = "ipc"
    topologies = ("pairs", "star", "stripes")
    default_topology = "pairs"
    why_these_topologies = "receivers read the sender's own memory, and so have nothing to send on"
    lacks: Mapping[str, str] = {**BucketedCheckpointEngine.lacks, "hosts": ONE_HOST}

    def __init__(self, bucket_size: int, *, device: str = "cuda", **common: Any) -> None:
        super().__init__(bucket_size, **common)
        self._device = require_device(device)

    def make_transport(self) -> BucketTransport:
        """Make one on the engine's device."""
        return IpcTransport(self._device)
