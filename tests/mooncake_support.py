"""Skips the tests of the real Mooncake where it cannot be imported, and says why."""

from __future__ import annotations

import pytest

from weightsync.engines.mooncake_session import import_mooncake
from weightsync.errors import MissingDependencyError


def _missing() -> str:
    try:
        import_mooncake()
    except MissingDependencyError as error:
        return error.message
    return ""


_REASON = _missing()


NEEDS_MOONCAKE = (pytest.mark.mooncake, pytest.mark.skipif(bool(_REASON), reason=_REASON))
"""Marks of what needs the real Mooncake, for `pytest.param`."""


def real_mooncake(test):
    """Mark a test, or a class of tests, that needs the real Mooncake."""
    for mark in NEEDS_MOONCAKE:
        test = mark(test)
    return test
