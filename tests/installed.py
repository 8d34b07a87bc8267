"""Distributions with entry points in a folder on the path: what a package manager leaves there."""

from __future__ import annotations

from pathlib import Path

GROUP = "weightsync.checkpoint_engines"
ENGINE = """
import sys
from weightsync.engines.base import CheckpointEngine

class CarrierEngine(CheckpointEngine):
    def __init__(self, bucket_size, device="cpu", note=""):
        self.bucket_size, self.device, self.note = bucket_size, device, note

    def prepare(self): ...
    def init_policy_process_group(self, **_): ...
    def init_rollout_process_group(self, **_): ...
    def finalize(self): ...
    async def send_weights(self, weights): ...
    async def receive_weight_batches(self):
        yield []
"""


def install(folder: Path, distribution: str, **names: str) -> None:
    """Write the metadata of a distribution, version 1.2, that brings engines: ``name=target``."""
    points = "".join(f"{name} = {target}\n" for name, target in names.items())
    install_text(folder, distribution, f"[console_scripts]\nx = y:z\n\n[{GROUP}]\n{points}")


def install_text(folder: Path, distribution: str, entry_points: str) -> None:
    """Write the metadata of a distribution with this ``entry_points.txt``."""
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


def install_module(folder: Path, name: str, code: str = ENGINE) -> None:
    """Write a module beside the metadata."""
    (folder / f"{name}.py").write_text(code)
