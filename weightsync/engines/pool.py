"""What a process keeps of things that are expensive to make and outlive the engines that use them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Idle items of this process, by key. A forked child starts with an empty pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, Hashable], list[T]] = {}

    def take(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return an idle item, or what ``make`` returns."""
        with self._lock:
            idle = self._idle.get((os.getpid(), key))
            if idle:
                return idle.pop()
        return make()

    def give(self, key: Hashable, item: T) -> None:
        """Put an item in for the next `take` of its key."""
        with self._lock:
            self._idle.setdefault((os.getpid(), key), []).append(item)
