"""The drills, as commands: what they print is what the workers served."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.nixl, pytest.mark.timeout(200)]


def test_the_elastic_demo_kills_replaces_and_checks_every_digest():
    command = [sys.executable, "-m", "weightsync", "elastic-demo"]
    done = subprocess.run(
        [*command, "--sequence", "1,3,2", "--kill-in", "2", "--json"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    phases = json.loads(done.stdout)
    assert [phase["workers"] for phase in phases] == [1, 3, 2]
    assert [phase["digests_right"] for phase in phases] == [1, 3, 2]
    assert [phase["version"] for phase in phases] == [1, 2, 3]
    assert [phase["kept"] for phase in phases] == [0, 1, 2]
    assert "got version 1 at once" in phases[1]["change"]
    assert "rank 2 killed in a refit that said so, and replaced" in phases[1]["change"]
