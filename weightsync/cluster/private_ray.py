"""A Ray of one's own on this machine, for a command that needs a few actors: started and taken away again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightsync.errors import MissingDependencyError

CPU_ACTOR_ENVIRONMENT = {
    # One thread an actor: they share few cores, and threads beyond the cores only get in each other's way.
    "OMP_NUM_THREADS": "1",
    # vLLM's engine in the actor's own process, on whatever cores are free, without telling anybody.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Nothing is fetched: checkpoints are local directories.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # Large pages make large copies on the CPU about twice as fast.
    "THP_MEM_ALLOC_ENABLE": "1",
    # All ranks are on this machine, whose own name may not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment of actors that compute on the CPU of one machine."""

_OBJECT_STORE_BYTES = 256 << 20


@contextmanager
def private_ray(
    actors: int,
    *,
    environment: Mapping[str, str] = CPU_ACTOR_ENVIRONMENT,
    python_path: Path | None = None,
    log_to_driver: bool = True,
) -> Iterator[Any]:
    """Yield the ``ray`` module, connected to a new local cluster; all of it is gone afterwards.

    Args:
        actors: CPU slots of the cluster, one for each actor. A count, not cores.
        environment: of the actors.
        python_path: a directory from which the actors import the caller's own modules.
        log_to_driver: whether what the actors print appears on this process's output.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    # Before the import: Ray's token authentication otherwise asks for a token that nobody made.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"this needs Ray: pip install 'weightsync[ray]' ({error})") from error
    # Short, because socket paths below it may not exceed 107 bytes.
    directory = tempfile.mkdtemp(prefix="ws-", dir="/tmp")
    try:
        ray.init(
            num_cpus=actors,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=directory,
            runtime_env={"env_vars": {**environment, **_path_entry(python_path)}},
            logging_level="ERROR",
            log_to_driver=log_to_driver,
        )
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _path_entry(python_path: Path | None) -> dict[str, str]:
    parts = [str(python_path) if python_path else None, os.environ.get("PYTHONPATH")]
    joined = os.pathsep.join(part for part in parts if part)
    return {"PYTHONPATH": joined} if joined else {}
