"""What is mixed into every vLLM worker (``worker_extension_cls``): the loader and the refit calls.

vLLM imports this module in each worker process and appends the class to the worker's bases, so no
constructor runs, and a name that the worker already has is refused at start.
"""

from __future__ import annotations

import socket
from typing import Any

import torch

from weightsync.errors import ConfigurationError, LifecycleError
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.loader import Batch
from weightsync.rollout.vllm.arguments import LOADER_OPTIONS_KEY
from weightsync.rollout.vllm.cpu import enable_amx, is_cpu_platform
from weightsync.rollout.vllm.loader import VllmLoader
from weightsync.tensors import TensorSpec, WeightManifest, dtype_name

if is_cpu_platform():
    enable_amx()


class VllmInternalWorkerExtension:
    """Generic loader of complete Hugging Face weights, for every vLLM worker."""

    _refit_loader: VllmLoader | None = None

    def _get_refit_loader(self) -> VllmLoader:
        if self._refit_loader is None:
            worker: Any = self
            options = (worker.vllm_config.additional_config or {}).get(LOADER_OPTIONS_KEY) or {}
            unknown = sorted(set(options) - {"allow_missing", "allow_unused"})
            if unknown:
                raise ConfigurationError(f"{LOADER_OPTIONS_KEY}: unknown keys {', '.join(unknown)}")
            self._refit_loader = VllmLoader(worker, **options)
        return self._refit_loader

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Check that what the next full-weight update will bring fits this rank's model.

        Args:
            state_dict_info: ``{name: (shape, dtype)}``; dtypes as ``torch.dtype`` or as ``"bfloat16"``.

        Raises:
            ManifestError: unknown, missing, misshapen or mistyped tensors.
        """
        specs = (
            TensorSpec(name, tuple(shape), dtype if isinstance(dtype, str) else dtype_name(dtype))
            for name, (shape, dtype) in state_dict_info.items()
        )
        self._get_refit_loader().check_manifest(WeightManifest.build(specs))

    def _load_hf_weights(self, policy_weights: Batch) -> None:
        """Load one batch inside a refit that was begun; the tensors may be reused afterwards."""
        self._get_refit_loader().load(policy_weights)

    def _load_full_hf_weights(self, policy_weights: Batch) -> None:
        """Load a complete set of weights: check, begin, load and finish in one call."""
        loader = self._get_refit_loader()
        loader.check_manifest(WeightManifest.build(TensorSpec.of(n, t) for n, t in policy_weights))
        loader.begin()
        try:
            self._load_hf_weights(policy_weights)
            loader.finish()
        except BaseException:
            loader.abort()
            raise

    def report_device_id(self) -> str:
        """Return the UUID of this rank's GPU, or ``cpu:<rank>`` where there is none."""
        if is_cpu_platform():
            return f"cpu:{self._refit_local_rank()}"
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def report_node_hostname(self) -> str:
        """Return the name of the machine that this rank runs on."""
        return socket.gethostname()

    def cleanup(self) -> None:
        """Give back what refits hold in this worker. The model stays as it is."""
        self._refit_loader = None

    def _refit_local_rank(self) -> int:
        """Return the rank within this engine; each data-parallel replica is an engine of its own."""
        worker: Any = self
        return int(worker.rank)


class VllmCheckpointEngineMixin:
    """The rollout rows of the worker protocol, as methods for ``collective_rpc``.

    Each returns an outcome (``docs/worker-protocol.md``) and never raises.
    """

    _refit_endpoint: RolloutEndpoint | None = None

    def checkpoint_engine_call(
        self, method: str, method_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run any method of the worker protocol by name."""
        return self._get_refit_endpoint().call(method, method_kwargs)

    def checkpoint_engine_total_memory_bytes(self, device: str) -> dict[str, Any]:
        """Return this rank's memory in bytes: of its GPU (``cuda``) or of the host (``cpu``)."""
        return self.checkpoint_engine_call("checkpoint_engine_total_memory_bytes", {"device": device})

    def init_checkpoint_engine(
        self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make this rank's checkpoint engine."""
        kwargs = {
            "backend": backend, "bucket_size_bytes": bucket_size_bytes, "engine_kwargs": engine_kwargs,
        }  # fmt: skip
        return self.checkpoint_engine_call("init_checkpoint_engine", kwargs)

    def prepare_checkpoint_engine(self) -> dict[str, Any]:
        """Return this rank's metadata for its peers."""
        return self.checkpoint_engine_call("prepare_checkpoint_engine")

    def init_checkpoint_engine_process_group(
        self, rank_prefix: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> dict[str, Any]:
        """Connect this rank, whose global rollout rank is ``rank_prefix`` plus its rank in the engine."""
        kwargs = {
            "rank_prefix": rank_prefix, "train_world_size": train_world_size,
            "rollout_world_size": rollout_world_size, "metadata": metadata,
        }  # fmt: skip
        return self.checkpoint_engine_call("init_checkpoint_engine_process_group", kwargs)

    def update_weights_from_checkpoint_engine(self) -> dict[str, Any]:
        """Receive and load the refit that was opened."""
        return self.checkpoint_engine_call("update_weights_from_checkpoint_engine")

    def finalize_checkpoint_engine(self) -> dict[str, Any]:
        """Release per-refit state of the engine."""
        return self.checkpoint_engine_call("finalize_checkpoint_engine")

    def _get_refit_endpoint(self) -> RolloutEndpoint:
        if self._refit_endpoint is None:
            worker: Any = self
            self._refit_endpoint = RolloutEndpoint(worker._refit_local_rank(), self._make_checked_loader)
        return self._refit_endpoint

    def _make_checked_loader(self) -> VllmLoader:
        self._validate_checkpoint_engine_weight_update()
        worker: Any = self
        loader: VllmLoader = worker._get_refit_loader()
        return loader

    def _validate_checkpoint_engine_weight_update(self) -> None:
        raise NotImplementedError("the worker extension says what its loader supports")


class VllmInternalWorkerExtensionWithCheckpointEngine(VllmCheckpointEngineMixin, VllmInternalWorkerExtension):
    """vLLM worker extension with checkpoint-engine refit."""

    def _validate_checkpoint_engine_weight_update(self) -> None:
        """Check, before an engine is made, that this worker's weights can be updated at all.

        Raises:
            LifecycleError: the model is not loaded yet.
            ConfigurationError: vLLM was started with a feature that refit does not cover.
        """
        worker: Any = self
        if getattr(worker, "model_runner", None) is None:
            raise LifecycleError("the vLLM worker has not loaded its model yet")
        self._get_refit_loader()

    def cleanup(self) -> None:
        """Close the checkpoint engine and give back what refits hold in this worker."""
        if self._refit_endpoint is not None:
            self._refit_endpoint.close_checkpoint_engine()
        self._refit_endpoint = None
        super().cleanup()
