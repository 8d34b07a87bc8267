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


def real_mooncake(test):
    """Mark a test, or a class of tests, that needs the real Mooncake."""
    return pytest.mark.mooncake(pytest.mark.skipif(bool(_REASON), reason=_REASON)(test))
