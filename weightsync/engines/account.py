"""The receiving side's books: what has come, against what was promised. No I/O."""

from __future__ import annotations

from weightsync.control import Bucket, Done
from weightsync.errors import IncompleteStreamError, ManifestError, ProtocolError
from weightsync.tensors import TensorSpec, WeightManifest, list_names


class Account:
    """Holds what arrives against what was promised: nothing unknown, repeated, changed or missing."""

    def __init__(self) -> None:
        self._promised: WeightManifest | None = None
        self._specs: list[TensorSpec] = []
        self._names: set[str] = set()
        self._buckets = 0

    def promise(self, manifest: WeightManifest) -> None:
        """Take the sender's manifest; it comes once, before the first bucket."""
        if self._promised is not None or self._buckets:
            raise ProtocolError("the sender announced a manifest in the middle of its stream")
        self._promised = manifest

    def enter(self, bucket: Bucket) -> None:
        """Enter one bucket's chunks.

        Raises:
            ProtocolError: a bucket is missing or repeated.
            ManifestError: a chunk opens a tensor that is not the next one promised, or came before.
        """
        if bucket.seq != self._buckets:
            raise ProtocolError(f"expected bucket {self._buckets}, got bucket {bucket.seq}")
        self._buckets += 1
        for entry in bucket.chunks:
            if entry.chunk_offset == 0:
                self._enter_tensor(entry.spec)

    def _enter_tensor(self, spec: TensorSpec) -> None:
        if spec.name in self._names:
            raise ManifestError("a tensor came twice", tensor=spec.name)
        if self._promised is not None:
            index = len(self._specs)
            promised = self._promised.tensors[index] if index < len(self._promised) else None
            if spec != promised:
                raise ManifestError(
                    f"got {spec}, but the manifest promised {promised or 'no more'}", tensor=spec.name
                )
        self._names.add(spec.name)
        self._specs.append(spec)

    def close(self, done: Done) -> WeightManifest:
        """Check the end of the stream; returns what has come.

        Raises:
            IncompleteStreamError: less came than was promised or sent.
        """
        came = WeightManifest(tuple(self._specs))
        missing = [name for name in self._promised.names if name not in self._names] if self._promised else []
        if missing:
            raise IncompleteStreamError(f"promised and never came: {list_names(missing)}", tensor=missing[0])
        counts = (self._buckets, len(came), came.nbytes, came.digest())
        if counts != (done.buckets, done.tensors, done.nbytes, done.manifest_digest):
            raise IncompleteStreamError(
                f"the sender sent {done.tensors} tensors of {done.nbytes} bytes in {done.buckets} buckets, "
                f"{len(came)} tensors of {came.nbytes} bytes in {self._buckets} buckets came"
            )
        return came
