"""Helpers for tests of users and plugin authors: tiny models, and a suite for any engine class.

`EngineConformance` needs pytest; the other modules do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import MissingDependencyError

if TYPE_CHECKING:
    from weightsync.testing.conformance import EngineConformance

__all__ = ["EngineConformance"]


def __getattr__(name: str) -> Any:
    if name != "EngineConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest  # noqa: F401 - the suite is made of pytest's tests
    except ImportError as error:
        raise MissingDependencyError("EngineConformance needs pytest: pip install pytest") from error
    from weightsync.testing.conformance import EngineConformance

    return EngineConformance
