"""Proof that weights arrived: refit an engine, compare it with one started from a checkpoint."""
