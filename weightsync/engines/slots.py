"""Which transfer buffers of a worker are in use. No I/O."""

from __future__ import annotations

from collections import Counter, deque


class Slots:
    """Hands out buffers by number; each is free again once all its users have dropped it.

    Not locked: its owner changes it with the control links locked, see `weightsync.control.Watch`.
    """

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._users: Counter[int] = Counter()

    @property
    def all_free(self) -> bool:
        """Whether none is in use."""
        return not any(self._users.values())

    def take(self) -> int | None:
        """Return a free one, of which this caller is the first user; `None` if all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._users[slot] = 1
        return slot

    def share(self, slot: int, users: int) -> None:
        """Add users to one that is in use."""
        self._users[slot] += users

    def drop(self, slot: int) -> None:
        """One user needs it no more."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._free.append(slot)

    def add(self, slot: int) -> None:
        """Take one more buffer into the books, free."""
        self._free.append(slot)
