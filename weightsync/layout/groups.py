"""Things that belong together, directly or through others. No I/O."""

from __future__ import annotations


class Groups:
    """Names in groups that grow together; a name that was never joined is a group of its own."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        """Return the name that stands for the group."""
        parent = self._parent
        while (above := parent.setdefault(name, name)) != name:
            parent[name] = parent[above]
            name = parent[name]
        return name

    def join(self, one: str, other: str) -> None:
        """Make one group of two."""
        self._parent[self.root(one)] = self.root(other)
