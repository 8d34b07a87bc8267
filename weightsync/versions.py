"""The versions of the weights that a driver has given, and the next one: they never go back. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import ConfigurationError, LifecycleError


@dataclass
class Versions:
    """Which versions there were.

    Attributes:
        published: the one published last; `None` before the first.
        floor: the highest that any rank has ever served; `None` if none has.
    """

    published: int | None = None
    floor: int | None = None

    def raise_floor(self, version: int | None) -> None:
        """Learn that a version is, or was, in use."""
        if version is not None:
            self.floor = version if self.floor is None else max(self.floor, version)

    def following(self, version: int | None) -> int:
        """Return the version of the next refit: the one that is wanted, by default the last one plus 1.

        Raises:
            ConfigurationError: it is no version.
            LifecycleError: it does not follow those that are in use.
        """
        if version is None:
            return 1 if self.floor is None else self.floor + 1
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ConfigurationError(f"sync_weights: version must be a whole number, got {version!r}")
        if self.floor is not None and version <= self.floor:
            raise LifecycleError(
                f"sync_weights: version {version} does not follow version {self.floor}, which is in use: "
                "versions must increase"
            )
        return version
