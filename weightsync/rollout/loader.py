"""What the receiver needs from a model: the `WeightLoader` protocol, and `RegionLoader` above it. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from weightsync.engines.base import ParameterBatch, RankMemory
from weightsync.errors import ConfigurationError
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


@runtime_checkable
class RegionLoader(WeightLoader, Protocol):
    """A loader that also knows which part of each tensor its rank stores, and takes parameters as they are.

    In a refit by regions, what is written in place comes between `begin` and `finish` without a call, batches
    of whole parameters through `load_parameters`, and whatever is not moved by regions through `load`.
    """

    def layout(self, manifest: WeightManifest, sharding: str) -> RankMemory:
        """Learn which regions of the tensors this rank stores, and where.

        Args:
            manifest: what every refit from now on will bring.
            sharding: ``"experts"`` (all other tensors are moved whole), ``"all"`` or ``"auto"``.

        Raises:
            ManifestError: the manifest does not fit the model; see `check_manifest`.
            ConfigurationError: this model, as it is run, cannot be refitted like that.
        """

    def load_parameters(self, batch: ParameterBatch) -> None:
        """Load whole parameters of this rank: names and shapes are those of its table's storages.

        They are borrowed, as in `load`. What no tensor of the manifest covers has no defined content.
        """

    def passes_over(self, name: str) -> bool:
        """Whether a tensor need not be read by any rank: it has another name, or was declared unused."""


def region_loader(loader: WeightLoader) -> RegionLoader:
    """Return the loader, if it can take parts of tensors.

    Raises:
        ConfigurationError: it takes whole tensors only.
    """
    if isinstance(loader, RegionLoader):
        return loader
    raise ConfigurationError(
        f"{type(loader).__name__} loads whole tensors only (it has no layout and load_parameters): "
        "write shard_weights: none",
        side="rollout",
    )
