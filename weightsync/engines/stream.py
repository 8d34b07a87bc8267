"""The weight stream as the sending side consumes it: item by item, held to its manifest, then closed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field

import torch

from weightsync.engines.stats import Stopwatch
from weightsync.errors import ManifestError
from weightsync.tensors import TensorSpec, WeightManifest

Weights = Generator[tuple[str, torch.Tensor], None, None]


def closing_stream(weights: Weights) -> AbstractContextManager[object]:
    """Return a context that closes a generator at its end, so that its clean-up runs then and not later."""
    return closing(weights) if hasattr(weights, "close") else nullcontext()


@dataclass
class PromisedOrder:
    """Watches a stream as it is consumed: counts it, and holds it to its manifest if it has one."""

    manifest: WeightManifest | None
    stopwatch: Stopwatch
    specs: list[TensorSpec] = field(default_factory=list)

    @classmethod
    def of(cls, weights: Weights, stopwatch: Stopwatch) -> PromisedOrder:
        """Watch a stream; one with a ``manifest`` is held to it."""
        return cls(getattr(weights, "manifest", None), stopwatch)

    def watch(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stream's items, timing how long each takes to make."""
        while (item := self._next(weights)) is not None:
            name, tensor = item
            del item  # here and below: the last tensor must be gone while the stream makes the next one
            spec = TensorSpec.of(name, tensor)
            self._require_promised(spec)
            self.specs.append(spec)
            yield name, tensor
            del tensor
        self._require_all_came()

    @property
    def last(self) -> int:
        """Place in the stream of the item that came last."""
        return len(self.specs) - 1

    def sent(self) -> WeightManifest:
        """Return the manifest of what has come."""
        return WeightManifest(tuple(self.specs))

    def _next(self, weights: Weights) -> tuple[str, torch.Tensor] | None:
        with self.stopwatch.phase("gather"):
            try:
                return next(weights, None)
            except BaseException as error:
                last = f", after {self.specs[-1].name!r:.200}" if self.specs else ""
                error.add_note(f"raised by the weight stream at item {len(self.specs)}{last}")
                raise

    def _require_promised(self, spec: TensorSpec) -> None:
        if self.manifest is None:
            return
        index = len(self.specs)
        promised = self.manifest.tensors[index] if index < len(self.manifest) else None
        if spec != promised:
            raise ManifestError(
                f"item {index} of the weight stream is {spec}, its manifest promised {promised or 'no more'}",
                tensor=spec.name,
            )

    def _require_all_came(self) -> None:
        if self.manifest is not None and len(self.specs) < len(self.manifest):
            missing = self.manifest.tensors[len(self.specs)]
            raise ManifestError(
                f"the weight stream ended after {len(self.specs)} of {len(self.manifest)} promised tensors; "
                f"the next was {missing}",
                tensor=missing.name,
            )
