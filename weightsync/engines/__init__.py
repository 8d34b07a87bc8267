"""Checkpoint engines: the contract, the registry and the built-in transports."""
