"""What one rollout rank serves: the committed version, whether weights were touched since, why it must not.

The state that decides whether a rank may serve; `weightsync.rollout.receiver` changes it.
"""

from __future__ import annotations

from typing import Any

from weightsync.digests import WeightDigest
from weightsync.errors import LifecycleError, WorkerFencedError


class ServingState:
    """Versions, and the fence.

    Args:
        rank: global rollout rank, for messages.

    Attributes:
        version: the version served, `None` before the first commit and while fenced.
        dirty: whether weights were written since the last commit.
        fenced: why this rank must not serve, or `None`.
        highest: the highest version that was ever committed here.
        stream_digest: of the weights committed last, as they came; `None` if they were not digested, or
            came in parts.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.version: int | None = None
        self.dirty = False
        self.fenced: str | None = None
        self.highest: int | None = None
        self.stream_digest: WeightDigest | None = None
        self._loaded: int | None = None
        self._busy = False

    def status(self) -> dict[str, Any]:
        """Return ``{"version", "highest", "dirty", "fenced"}``."""
        return {
            "version": self.version,
            "highest": self.highest,
            "dirty": self.dirty,
            "fenced": self.fenced,
        }

    def require_serving(self) -> None:
        """Check that the weights are whole.

        Raises:
            WorkerFencedError: a refit wrote some of them and was not committed.
        """
        if self.fenced is not None or self.dirty:
            reason = self.fenced or "a refit has begun and is not committed"
            raise WorkerFencedError(
                f"this worker does not serve: {reason}; a complete refit is needed",
                side="rollout",
                rank=self.rank,
            )

    def require_next(self, version: int) -> None:
        """Check that ``version`` may follow what was served here, and that no refit is running.

        While nothing is served, the version that was committed last may come once more.

        Raises:
            LifecycleError: it is stale or repeated, or a refit is running.
        """
        if self._busy:
            raise self._lifecycle(f"refit to version {version} while another one runs", "open")
        if self.version is not None and version <= self.version:
            raise self._lifecycle(
                f"version {version} does not follow version {self.version}: versions must increase",
                "open",
            )
        if self.highest is not None and version < self.highest:
            raise self._lifecycle(
                f"version {version} is older than version {self.highest}, which was served here: "
                "versions must increase",
                "open",
            )

    def _serve(self, version: int, came: WeightDigest | None) -> int:
        """Make what was loaded the version that is served. Lifts a fence.

        Raises:
            LifecycleError: this version was not completely received, or is stale.
        """
        self.require_next(version)
        if self._loaded != version:
            held = "nothing" if self._loaded is None else f"version {self._loaded}"
            raise self._lifecycle(f"commit of version {version}, but {held} was received", "commit")
        self.version, self.highest, self.stream_digest = version, version, came
        self.dirty, self.fenced, self._loaded = False, None, None
        return version

    def _touch(self) -> None:
        """Weights are about to be written: what is served has no version until the commit."""
        self.dirty, self.version, self.stream_digest = True, None, None

    def _close(self, reason: str) -> None:
        """Serve nothing until a complete refit."""
        self.fenced, self.version, self._loaded, self.stream_digest = reason, None, None, None

    def _lifecycle(self, message: str, phase: str) -> LifecycleError:
        return LifecycleError(message, side="rollout", rank=self.rank, phase=phase)
