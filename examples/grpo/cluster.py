"""A Ray of this run's own on this machine, started and taken away again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ACTOR_ENVIRONMENT = {
    # One thread an actor: they share few cores, and threads beyond the cores only get in each other's way.
    "OMP_NUM_THREADS": "1",
    # vLLM's engine in the actor's own process, on whatever cores are free, without telling anybody.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Nothing is fetched: the checkpoint is a local directory.
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
_OBJECT_STORE_BYTES = 256 << 20


@contextmanager
def local_ray(actors: int) -> Iterator[Any]:
    """Yield the ``ray`` module, connected to a new local cluster that has a CPU slot for each actor.

    The slots are a count, not cores. On the way out all actors end and the cluster's files are removed.
    """
    # Before the import: Ray's token authentication otherwise asks for a token that nobody made.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # Short, because socket paths below it may not exceed 107 bytes.
    directory = tempfile.mkdtemp(prefix="ws-", dir="/tmp")
    try:
        ray.init(
            num_cpus=actors,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=directory,
            runtime_env={"env_vars": {**_ACTOR_ENVIRONMENT, "PYTHONPATH": _python_path()}},
            logging_level="ERROR",
        )
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _python_path() -> str:
    """Return a path on which actors find this package under the name it has here."""
    depth = len(__name__.split("."))
    root = Path(__file__).resolve().parents[depth - 1]
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(root), *([inherited] if inherited else [])])
