"""How much memory a worker reports."""

import psutil
import pytest
import torch

from weightsync.capacity import host_memory_bytes, total_memory_bytes
from weightsync.errors import ConfigurationError


def groups(tmp_path, line: str, limits: dict[str, str]):
    """Write a control-group tree below ``tmp_path`` and the process's own group line."""
    for path, text in limits.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    own = tmp_path / "own"
    own.write_text(line)
    return tmp_path / "cgroup", own


def physical() -> int:
    return psutil.virtual_memory().total


def test_host_memory_is_at_most_physical():
    assert 0 < total_memory_bytes("cpu") <= physical()


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "1048576\n"}, 1048576),
        ("0::/job\n", {"job/memory.max": "4096\n", "memory.max": "8192\n"}, 4096),
        ("0::/host/only\n", {"memory.max": "8192\n"}, 8192),
        ("0::/../outside\n", {"memory.max": "8192\n"}, 8192),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "12288\n"}, 12288),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("5:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "1\n"}, None),
        ("", {}, None),
    ],
)
def test_control_group_limit(tmp_path, line, limits, expected):
    assert host_memory_bytes(*groups(tmp_path, line, limits)) == (expected or physical())


def test_no_control_groups_at_all(tmp_path):
    assert host_memory_bytes(tmp_path / "none", tmp_path / "neither") == physical()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(ConfigurationError, match="device: cpu"):
        total_memory_bytes("cuda")


@pytest.mark.parametrize("device", ["gpu", "", "cpu:0", "mps"])
def test_unknown_device(device):
    with pytest.raises(ConfigurationError, match="device must be"):
        total_memory_bytes(device)
