"""Engines whose policy ranks keep what they have sent, and give it to workers that come later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.calls import require_unjoined
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.refit import Refit
from weightsync.engines.session import Session
from weightsync.engines.shelf import Shelf
from weightsync.engines.steward import Held, Steward, share_of
from weightsync.engines.stream import Weights
from weightsync.engines.transport import BucketTransport
from weightsync.errors import LifecycleError, WeightSyncError
from weightsync.topology import RankId

_GRACE_S = 2.0
_NOTHING_YET = "no refit has been completed"


class HoldingCheckpointEngine(BucketedCheckpointEngine):
    """An engine that packs each policy rank's whole share before anybody has to fetch it, and keeps it.

    A policy rank needs as many buffers as its share takes. They are made in the first refit, used again in
    each later one, and freed by `close`, and by `finalize` with ``release_after_refit``; what is held is then
    lost. It is also lost when a refit fails after it has begun to pack.

    Workers that come later are served between two refits by a thread of each policy rank, the `Steward`,
    whatever the rank's caller does meanwhile. A refit that begins gives one that is being served two more
    seconds and then turns it away, with an error that says so.
    """

    lacks: Mapping[str, str] = {}
    keeps_buckets: ClassVar[bool] = True

    def __init__(self, bucket_size: int, **common: Any) -> None:
        super().__init__(bucket_size, **common)
        self._steward: Steward | None = None
        self._held: Held | str = _NOTHING_YET

    @abstractmethod
    def make_transport(self) -> BucketTransport:
        """As for `BucketedCheckpointEngine`; the transport must be one that can be extended."""

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """As for `BucketedCheckpointEngine`; from now on latecomers are served."""
        super().init_policy_process_group(
            worker_rank=worker_rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )
        session, transport = self._prepared()
        if session.guests is not None:
            make_refit = partial(self._refit_of, session, transport, None, None)
            self._steward = Steward(session.guests, session.watch, make_refit, self._held)

    def join_late(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the policy ranks as one that comes after a refit; see `CheckpointEngine.join_late`.

        ``metadata`` hold the tickets that let it in, so they are to be kept among the workers of one job.
        `receive_weight_batches` may be called again, and brings what is held then. Where the policy ranks
        serve another one, or are in a refit, it waits for ``connect_s``.

        Raises:
            ConfigurationError: the metadata are not the policy ranks'.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        with self._calls.hold("join_late"):
            session, _ = self._prepared()
            require_unjoined(session.who)
            topology = self._choice.of(train_world_size, max(rollout_world_size, rollout_rank + 1))
            self._enter(RankId("rollout", rollout_rank), topology, metadata, late=True)

    async def _send(
        self, weights: Weights, session: Session, refit: Refit, lockstep: Lockstep
    ) -> dict[str, float]:
        steward = self._steward
        if steward is None:
            raise LifecycleError("this rank has left its process group")
        shelf = Shelf(refit.transport)
        try:
            step_aside = partial(steward.step_aside, grace_s=min(_GRACE_S, self._deadlines.connect_s / 4))
            await refit.waiter.run(step_aside, undo=lambda: steward.resume(steward.held))
            figures = await super()._send(weights, session, replace(refit, shelf=shelf), lockstep)
            epoch, version = refit.agreed[-1]
            self._held = Held(epoch, version, share_of(refit), tuple(shelf.said))
        except BaseException as error:
            if shelf.is_written:
                self._held = f"the last refit failed: {_first_line(error)}"
            raise
        finally:
            steward.resume(self._held)
        return figures

    def _close_session(self) -> None:
        steward, self._steward = self._steward, None
        if steward is not None:
            steward.close()
        super()._close_session()

    def _release(self) -> None:
        self._held = "it was released after the last refit"
        super()._release()


def _first_line(error: BaseException) -> str:
    text = error.message if isinstance(error, WeightSyncError) else str(error)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]:.300}"
