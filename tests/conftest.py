"""Settings of the whole suite: equal examples in every run, workers beside each other, no sockets left."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests.own_files import sign_semaphores

settings.register_profile(
    "weightsync",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("weightsync")
sign_semaphores()


def pytest_collection_finish():
    """Many tests collect garbage to see what is left; they need not search what will stay in any case."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.side_by_side import Scheduling

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        from tests.side_by_side import longest_first

        items.sort(key=lambda item: longest_first(item.path))


@pytest.fixture(scope="session", autouse=True)
def vllm_sockets():
    """A short path for vLLM's sockets, removed at the end: engines leave them behind, also if shut down."""
    path = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_RPC_BASE_PATH", path)
        yield path
    shutil.rmtree(path, ignore_errors=True)
