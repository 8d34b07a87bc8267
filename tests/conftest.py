"""Settings of the whole suite: property tests draw the same examples in every run; sockets are cleared up."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "weightsync",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("weightsync")


@pytest.fixture(scope="session", autouse=True)
def vllm_sockets():
    """A short path for vLLM's sockets, removed at the end: engines leave them behind, also if shut down."""
    path = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_RPC_BASE_PATH", path)
        yield path
    shutil.rmtree(path, ignore_errors=True)
