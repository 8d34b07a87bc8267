"""Refit of any torch module: by name, tensor by tensor, into parameters and persistent buffers.

`ModuleLoader` is the loader; `ModuleRolloutWorker` is a whole rollout worker around a module, for engines
without an integration of their own: it answers the driver's calls and says whether it may serve.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from weightsync.engines.base import ParameterBatch
from weightsync.errors import LifecycleError, ManifestError
from weightsync.outcomes import run_for_outcome
from weightsync.rollout.controls import control_method, require_in_flight_mode
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.loader import Batch
from weightsync.rollout.module_memory import ModuleMemory
from weightsync.rollout.module_state import copy_whole, identity, local_tensor, named_state
from weightsync.tensors import TensorSpec, WeightManifest, list_names

__all__ = ["ModuleLoader", "ModuleRolloutWorker", "named_state"]


class ModuleLoader:
    """Loads a weight stream into a module whose state-dict names, shapes and dtypes it bears.

    Tensors are looked up by name at each refit, so parameters may be replaced in between. Of names that
    share one tensor, any or all may come. A buffer that is not persistent is not expected. Of a DTensor the
    stream brings the whole, and this rank takes its shard of it; in a refit by regions only that comes.

    Args:
        model: the module; its tensors must be materialised.
        allow_missing: patterns (as for file names) of tensors that need not come.
        allow_unused: patterns of names that may come and are passed over.
    """

    kind = "module"

    def __init__(
        self, model: torch.nn.Module, allow_missing: Sequence[str] = (), allow_unused: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.allow_missing = tuple(allow_missing)
        self.allow_unused = tuple(allow_unused)
        self._slots: dict[str, torch.Tensor] | None = None
        self._memory: ModuleMemory | None = None

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Refuse unknown, missing, misshapen and mistyped tensors; see `WeightLoader`."""
        slots = dict(named_state(self.model))
        _refuse("does not know", self._unknown(manifest, slots))
        used = [spec for spec in manifest.tensors if spec.name in slots]
        _refuse_misfits(used, slots)
        _refuse("did not get", self._missing(manifest, slots))

    def begin(self) -> None:
        """Look the tensors up; see `WeightLoader`."""
        self._slots = dict(named_state(self.model))

    @torch.no_grad()
    def load(self, batch: Batch) -> None:
        """Copy each tensor into its place; see `WeightLoader`."""
        if self._slots is None:
            raise LifecycleError("load before begin", side="rollout", phase="load")
        for name, tensor in batch:
            if name in self._slots:
                _require_fit(TensorSpec.of(name, tensor), self._slots[name])
                copy_whole(tensor, self._slots[name])
            elif not _matches(name, self.allow_unused):
                raise ManifestError("the module does not know this tensor", tensor=name, phase="load")

    def finish(self) -> None:
        """Let go of the tensors; see `WeightLoader`."""
        self._slots = None

    def abort(self) -> None:
        """Let go of the tensors; see `WeightLoader`."""
        self._slots = None

    def served(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer, of DTensors this rank's shard; see `WeightLoader`."""
        for name, tensor in named_state(self.model):
            yield name, local_tensor(tensor)

    def originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those that this rank has whole: they are stored as they come; see `WeightLoader`."""
        for name, tensor in named_state(self.model):
            local = local_tensor(tensor)
            if local.shape == tensor.shape:
                yield name, local

    def layout(self, manifest: WeightManifest, sharding: str) -> ModuleMemory:
        """Return where this rank has its parts of the tensors; see `RegionLoader`."""
        self.check_manifest(manifest)
        self._memory = ModuleMemory(self.model, manifest, sharding)
        return self._memory

    def load_parameters(self, batch: ParameterBatch) -> None:
        """Copy whole local tensors into their places; see `RegionLoader`."""
        if self._slots is None or self._memory is None:
            raise LifecycleError("load before begin and layout", side="rollout", phase="load")
        for name, tensor in batch:
            self._memory.load(name, tensor)

    def passes_over(self, name: str) -> bool:
        """Whether a tensor has another name here or may be unused; see `RegionLoader`."""
        tied = self._memory is not None and name in self._memory.ties
        return tied or _matches(name, self.allow_unused)

    def _unknown(self, manifest: WeightManifest, slots: dict[str, torch.Tensor]) -> list[str]:
        return [
            name for name in manifest.names if name not in slots and not _matches(name, self.allow_unused)
        ]

    def _missing(self, manifest: WeightManifest, slots: dict[str, torch.Tensor]) -> list[str]:
        came = {identity(slots[name]) for name in manifest.names if name in slots}
        return [
            name
            for name, tensor in slots.items()
            if identity(tensor) not in came and not _matches(name, self.allow_missing)
        ]


class ModuleRolloutWorker:
    """A rollout worker around one module. Make it where the module lives: in a process or a Ray actor.

    It is an engine host of one rank: `checkpoint_engine_rpc` and `refit_control` answer as
    ``docs/worker-protocol.md`` says. Call `require_serving` before each use of the module.

    Args:
        model: the module to refit.
        allow_missing: see `ModuleLoader`.
        allow_unused: see `ModuleLoader`.
        rank_prefix: global rollout rank, where it is known from the start.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        allow_missing: Sequence[str] = (),
        allow_unused: Sequence[str] = (),
        rank_prefix: int = 0,
    ) -> None:
        self.model = model
        self.published_version: int | None = None
        self._rank = rank_prefix
        self._paused = False
        self._endpoint = RolloutEndpoint(0, lambda: ModuleLoader(model, allow_missing, allow_unused))

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run one method of the worker protocol; returns a list of one outcome."""
        return [self._endpoint.call(checkpoint_method, method_kwargs)]

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Like `checkpoint_engine_rpc`, for a thread that runs an event loop."""
        return [await self._endpoint.call_async(checkpoint_method, method_kwargs)]

    def refit_control(self, action: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one action of an engine host; returns one outcome."""
        return run_for_outcome(
            "rollout", self._rank, action, lambda: control_method(self, action)(**(kwargs or {}))
        )

    def require_serving(self) -> None:
        """Check that the module may be used now.

        Raises:
            WorkerFencedError: it holds partly written weights.
            LifecycleError: it is paused for a refit.
        """
        if self._endpoint.receiver is not None:
            self._endpoint.receiver.require_serving()
        if self._paused:
            raise LifecycleError("this worker is paused for a refit", side="rollout", rank=self._rank)

    def control_pause(self, in_flight: str = "wait") -> None:
        """Let no request begin. The module's owner calls it synchronously, so none is in flight."""
        require_in_flight_mode(in_flight)
        self._paused = True

    def control_release_kv_cache(self) -> None:
        """Do nothing: a plain module has no cache."""

    def control_resume_weights(self) -> None:
        """Do nothing: a plain module does not sleep."""

    def control_resume_kv_cache(self) -> None:
        """Do nothing: a plain module has no cache."""

    def control_reset_caches(self) -> None:
        """Do nothing: a plain module has no cache."""

    def control_publish_version(self, version: int) -> None:
        """Make ``version`` the published one; it must be the one that was committed."""
        status = self._endpoint.refit_status()
        if status["version"] != version:
            raise LifecycleError(f"cannot publish version {version}: committed is {status['version']}")
        self.published_version = version

    def control_resume(self) -> None:
        """Let requests run again; a fenced worker still refuses them."""
        self._paused = False

    def control_assign_ranks(self, rank_prefix: int) -> None:
        """Learn the global rollout rank."""
        self._rank = rank_prefix

    def control_describe(self) -> dict[str, int]:
        """Return ``{"world_size", "pid"}``."""
        return {"world_size": 1, "pid": os.getpid()}


def _require_fit(spec: TensorSpec, slot: torch.Tensor) -> None:
    _refuse_misfits([spec], {spec.name: slot})


def _refuse_misfits(specs: list[TensorSpec], slots: dict[str, torch.Tensor]) -> None:
    misfits = {}
    for spec in specs:
        slot = slots[spec.name]
        if slot.is_meta:
            raise LifecycleError("the module is not materialised: its weights are on the meta device",
                                 side="rollout", phase="manifest", tensor=spec.name)  # fmt: skip
        wanted = TensorSpec.of(spec.name, slot)
        if wanted != spec:
            misfits[spec.name] = f"{spec} where the module has {wanted.dtype}{list(wanted.shape)}"
    if misfits:
        first = next(iter(misfits))
        others = f"; and {list_names(list(misfits)[1:])}" if len(misfits) > 1 else ""
        raise ManifestError(f"got {misfits[first]}{others}", tensor=first, phase="manifest")


def _refuse(what: str, names: list[str]) -> None:
    if names:
        raise ManifestError(
            f"the module {what} {len(names)} tensor{'s' * (len(names) > 1)}: {list_names(names)}",
            tensor=names[0],
            phase="manifest",
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
