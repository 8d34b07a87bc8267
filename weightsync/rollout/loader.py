"""What the receiver needs from a model: the `WeightLoader` protocol. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from weightsync.tensors import WeightManifest

Batch = list[tuple[str, torch.Tensor]]


@runtime_checkable
class WeightLoader(Protocol):
    """Puts named tensors into one model. One refit is ``begin``, any number of ``load``, ``finish``."""

    kind: str
    """What stands in the printed line: ``[{kind} refit] Loaded ...``."""

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Refuse a refit that does not fit the model. Writes nothing; called before the first write.

        Raises:
            ManifestError: unknown, missing, repeated, misshapen or mistyped tensors.
        """

    def begin(self) -> None:
        """Start a refit. Also after an aborted one."""

    def load(self, batch: Batch) -> None:
        """Load one batch. Its tensors are borrowed: nothing may refer to their memory afterwards."""

    def finish(self) -> None:
        """End a refit: every tensor is in place and the model may serve."""

    def abort(self) -> None:
        """Give up a begun refit: a new `begin` works, and no borrowed memory is referenced.

        The model may hold a mixture of old and new weights.
        """

    def served(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are served, under the names and in the form in which they are stored."""

    def originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those tensors that can be read back in the form, and under the names, in which they came."""
