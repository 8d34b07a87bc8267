"""Checkpoint engines: the contract, the registry and the built-in transports."""

from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine, register_checkpoint_engine

__all__ = ["CheckpointEngine", "create_checkpoint_engine", "register_checkpoint_engine"]
