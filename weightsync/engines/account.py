"""The receiving side's books: what has come, against what was promised. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from weightsync.control import Bucket, Done
from weightsync.errors import IncompleteStreamError, ManifestError, ProtocolError
from weightsync.tensors import TensorSpec, WeightManifest, list_names
from weightsync.topology import RankId


class Account:
    """Holds what arrives against what was promised: nothing unknown, repeated, changed or missing.

    Of several senders each has a share of one stream, and all must tell the same of it.
    """

    def __init__(self) -> None:
        self._promised: WeightManifest | None = None
        self._promisers: set[RankId] = set()
        self._specs: dict[int, TensorSpec] = {}
        self._names: set[str] = set()
        self._buckets: Counter[RankId] = Counter()

    def promise(self, source: RankId, manifest: WeightManifest) -> bool:
        """Take a sender's manifest, which comes once, before its first bucket; returns whether it is new.

        Raises:
            ProtocolError: it came before, or late.
            ManifestError: another sender has promised something else.
        """
        if source in self._promisers or self._buckets[source]:
            raise ProtocolError("the sender announced a manifest in the middle of its stream")
        self._promisers.add(source)
        is_new = self._promised is None
        if self._promised is not None and manifest != self._promised:
            raise ManifestError(
                f"{source} promises other weights than the others: {_difference(manifest, self._promised)}"
            )
        self._promised = manifest
        if is_new:
            for ordinal, spec in self._specs.items():
                self._require_promised(ordinal, spec)
        return is_new

    def enter(self, source: RankId, bucket: Bucket) -> None:
        """Enter one bucket's chunks.

        Raises:
            ProtocolError: a bucket is missing or repeated.
            ManifestError: a chunk's tensor is not the one promised in its place, or came before.
        """
        if bucket.seq != self._buckets[source]:
            raise ProtocolError(f"expected bucket {self._buckets[source]}, got bucket {bucket.seq}")
        self._buckets[source] += 1
        for entry in bucket.chunks:
            known = self._specs.get(entry.ordinal)
            if known is None:
                self._enter_tensor(entry.ordinal, entry.spec)
            elif known != entry.spec:
                raise ManifestError(f"it came as {known}, and now as {entry.spec}", tensor=entry.spec.name)

    def _enter_tensor(self, ordinal: int, spec: TensorSpec) -> None:
        if spec.name in self._names:
            raise ManifestError("a tensor came twice", tensor=spec.name)
        self._require_promised(ordinal, spec)
        self._names.add(spec.name)
        self._specs[ordinal] = spec

    def _require_promised(self, ordinal: int, spec: TensorSpec) -> None:
        if self._promised is None:
            return
        promised = self._promised.tensors[ordinal] if ordinal < len(self._promised) else None
        if spec != promised:
            raise ManifestError(
                f"got {spec}, but the manifest promised {promised or 'no more'}", tensor=spec.name
            )

    def close(self, dones: Mapping[RankId, Done]) -> WeightManifest:
        """Check the end of the stream; returns what has come.

        Args:
            dones: each sender's last word.

        Raises:
            IncompleteStreamError: less came than was promised or sent, or a place in the stream is empty.
            ManifestError: the senders did not send the same stream.
        """
        came = WeightManifest(tuple(spec for _, spec in sorted(self._specs.items())))
        missing = [name for name in self._promised.names if name not in self._names] if self._promised else []
        if missing:
            raise IncompleteStreamError(f"promised and never came: {list_names(missing)}", tensor=missing[0])
        self._require_no_gap()
        counts = (len(came), came.nbytes, came.digest())
        for source, done in dones.items():
            sent = (done.tensors, done.nbytes, done.manifest_digest)
            if sent != counts or done.buckets != self._buckets[source]:
                raise IncompleteStreamError(
                    f"the stream that {source} has sent, its share in {done.buckets} buckets, has "
                    f"{done.tensors} tensors of {done.nbytes} bytes; {self._buckets[source]} buckets came "
                    f"from there, and {len(came)} tensors of {came.nbytes} bytes in all"
                )
        return came

    def _require_no_gap(self) -> None:
        gap = next((place for place, ordinal in enumerate(sorted(self._specs)) if place != ordinal), None)
        if gap is not None:
            raise IncompleteStreamError(f"tensor number {gap} of the stream never came, and later ones did")


def _difference(one: WeightManifest, other: WeightManifest) -> str:
    for mine, theirs in zip(one.tensors, other.tensors, strict=False):
        if mine != theirs:
            return f"{mine} in place of {theirs}"
    return f"{len(one)} tensors in place of {len(other)}"
