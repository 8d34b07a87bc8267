"""A rollout rank that comes after a refit: a second engine beside its own brings what the policy side holds.

The rank's own engine has joined all others for the refits to come, and cannot be used for that: nobody else
takes part.
"""

from __future__ import annotations

from typing import Any

from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import LifecycleError
from weightsync.rollout.receiver import RefitReceiver


class Latecomer:
    """Puts an engine that has joined late in the place of a receiver's own, and gives that back."""

    def __init__(self) -> None:
        self._receiver: RefitReceiver | None = None
        self._own: CheckpointEngine | None = None

    @property
    def is_here(self) -> bool:
        """Whether the receiver has the other engine now."""
        return self._receiver is not None

    def join(
        self, receiver: RefitReceiver, *, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, Any],
        **place: Any,
    ) -> str | None:  # fmt: skip
        """Make an engine, and join the policy ranks with it, as one that comes late.

        Args:
            receiver: of the rank.
            backend: as for `create_checkpoint_engine`, and so the next two.
            bucket_size_bytes: see there.
            engine_kwargs: see there.
            place: the keywords of `CheckpointEngine.join_late`.

        Returns:
            Why this engine serves no latecomers; `None` if it has joined.
        """
        engine = create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_size_bytes, engine_kwargs=engine_kwargs
        )
        try:
            if "latecomers" not in engine.lacks:
                engine.prepare()
                engine.join_late(**place)
                self._receiver, self._own, receiver.engine = receiver, receiver.engine, engine
                return None
            return engine.lacks["latecomers"]
        finally:
            if not self.is_here:
                engine.close()

    def require(self, version: int) -> None:
        """Check that what was held, if it was received so, is the version that is to be committed.

        Raises:
            LifecycleError: the policy ranks hold another one.
        """
        if self._receiver is None:
            return
        held = self._receiver.engine.refit_stats().get("version")
        if held != version:
            raise LifecycleError(f"the policy ranks hold version {held}, not version {version}")

    def leave(self) -> None:
        """Close the other engine, and give the receiver its own. Nothing to do if it has that."""
        if self._receiver is None or self._own is None:
            return
        late, self._receiver.engine = self._receiver.engine, self._own
        self._receiver = self._own = None
        late.close()
