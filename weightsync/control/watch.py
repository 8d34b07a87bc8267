"""Waiting for news of several links at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Watch:
    """Waits on the links of one hub, and on whatever else `wake` is called for.

    Args:
        news: the hub's condition, which guards its links.
    """

    def __init__(self, news: threading.Condition) -> None:
        self._news = news

    def until(self, probe: Callable[[], T | None], *, timeout_s: float) -> T | None:
        """Return what ``probe`` returns as soon as that is not `None`; `None` after ``timeout_s`` seconds.

        ``probe`` is called at first and after all news, with the links locked; it must not wait. What it
        raises is raised.
        """
        end = time.monotonic() + timeout_s
        with self._news:
            while (found := probe()) is None:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)
            return found

    def wake(self, change: Callable[[], object] = lambda: None) -> None:
        """Make a change with the links locked, and let those that wait look again."""
        with self._news:
            change()
            self._news.notify_all()
