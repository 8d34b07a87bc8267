"""The account of one received stream: what was promised, what came, and whether they agree. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from weightsync.errors import IncompleteStreamError, ManifestError
from weightsync.rollout.loader import Batch
from weightsync.tensors import TensorSpec, WeightManifest, list_names


class StreamLedger:
    """Compares a stream with its manifest, and has the model's check run on either.

    Args:
        check: raises to refuse a manifest; run on the announced manifest before the first tensor, or, when
            the engine announces none, on what came before the refit is finished.
    """

    def __init__(self, check: Callable[[WeightManifest], None]) -> None:
        self._check = check
        self._announced: WeightManifest | None = None
        self._promised: dict[str, TensorSpec] = {}
        self._came: dict[str, TensorSpec] = {}

    @property
    def is_silent(self) -> bool:
        """Whether nothing came and nothing, not even an empty manifest, was promised."""
        return self._announced is None and not self._came

    def announce(self, manifest: WeightManifest) -> None:
        """Take the manifest that the engine brings before the first batch.

        Raises:
            ManifestError: it repeats a name or does not fit the model.
        """
        manifest = WeightManifest.build(manifest.tensors)
        self._check(manifest)
        self._announced = manifest
        self._promised = {spec.name: spec for spec in manifest.tensors}

    def record(self, batch: Batch) -> None:
        """Enter a batch, before it is loaded.

        Raises:
            ManifestError: a name came twice, was not promised, or has another shape or dtype.
        """
        self.record_specs([TensorSpec.of(name, tensor) for name, tensor in batch])

    def record_specs(self, specs: Sequence[TensorSpec]) -> None:
        """Enter tensors that came in parts, by their descriptions; as `record`."""
        self._require_new([spec.name for spec in specs])
        if self._announced is not None:
            self._require_promised(specs)
        self._came.update((spec.name, spec) for spec in specs)

    def require_complete(self) -> None:
        """Check, at the end of the stream, that everything came that had to.

        Raises:
            IncompleteStreamError: promised tensors did not come.
            ManifestError: nothing was promised, and what came does not fit the model.
        """
        if self._announced is None:
            self._check(WeightManifest(tuple(self._came.values())))
            return
        absent = [name for name in self._promised if name not in self._came]
        if absent:
            raise IncompleteStreamError(
                f"{len(absent)} of {len(self._promised)} promised tensors did not come: {list_names(absent)}",
                tensor=absent[0],
            )

    def _require_new(self, names: list[str]) -> None:
        counts = Counter(names)
        repeated = [name for name, count in counts.items() if count > 1 or name in self._came]
        if repeated:
            raise ManifestError(f"came twice in one refit: {list_names(repeated)}", tensor=repeated[0])

    def _require_promised(self, specs: Sequence[TensorSpec]) -> None:
        unknown = [spec.name for spec in specs if spec.name not in self._promised]
        if unknown:
            raise ManifestError(f"came and was not promised: {list_names(unknown)}", tensor=unknown[0])
        for spec in specs:
            if self._promised[spec.name] != spec:
                raise ManifestError(
                    f"received {spec}, promised was {self._promised[spec.name]}", tensor=spec.name
                )
