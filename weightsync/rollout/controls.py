"""The `refit_control` actions of an engine host: their names, and how one is called. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.errors import ConfigurationError

CONTROL_ACTIONS = (
    "pause",
    "release_kv_cache",
    "resume_weights",
    "resume_kv_cache",
    "reset_caches",
    "publish_version",
    "resume",
    "assign_ranks",
    "describe",
)
"""What `refit_control` takes as its action."""

IN_FLIGHT_MODES = ("abort", "wait", "keep")
"""What `pause` may do with requests that are running."""


def control_method(host: object, action: str) -> Callable[..., Any]:
    """Return the host's method for an action: the one named ``control_<action>``.

    Raises:
        ConfigurationError: there is no such action.
    """
    if action not in CONTROL_ACTIONS:
        raise ConfigurationError(f"unknown action {action!r}; known: {', '.join(CONTROL_ACTIONS)}")
    method: Callable[..., Any] = getattr(host, f"control_{action}")
    return method


def require_in_flight_mode(mode: str) -> None:
    """Check the argument of ``pause``.

    Raises:
        ConfigurationError: unknown mode.
    """
    if mode not in IN_FLIGHT_MODES:
        raise ConfigurationError(f"in_flight must be one of {', '.join(IN_FLIGHT_MODES)}, got {mode!r}")
