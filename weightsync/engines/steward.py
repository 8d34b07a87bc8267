"""The steward: the thread of a policy rank that gives latecomers what the last refit has left behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.control import Bucket, Complete, Done, GuestLink, Message, Watch
from weightsync.engines.outlet import Outlet
from weightsync.engines.refit import Refit
from weightsync.engines.slots import Slots
from weightsync.errors import DeadlineError, LifecycleError, WeightSyncError

_log = logging.getLogger(__name__)

_LOOK_S = 60.0
_GREET_S = 3.0
_END_S = 10.0


@dataclass(frozen=True)
class Held:
    """What a rank holds of the last refit: which epoch, version and share, and the messages that give it."""

    epoch: int
    version: int | None
    share: tuple[int, int]
    said: tuple[Message, ...]


def share_of(refit: Refit) -> tuple[int, int]:
    """Return which share of the stream a policy rank sends, and of how many."""
    return refit.who.rank, refit.topology.train_world_size


class Steward:
    """Serves one guest after the other, in a thread of its own, while no refit runs.

    A guest hears what the receivers of the refit have heard, and fetches in the same way. Its last word is
    answered: only then may it believe that the buffers stayed as they were while it read.

    Args:
        guests: the link that they dial.
        watch: of the link's hub.
        make_refit: makes what a guest's refit works with; called in the thread.
        held: what is held; a text says why nothing is.
    """

    def __init__(
        self, guests: GuestLink, watch: Watch, make_refit: Callable[[], Refit], held: Held | str
    ) -> None:
        self._guests = guests
        self._watch = watch
        self._make_refit = make_refit
        self._held = held
        # Changed with the links locked:
        self._aside = self._closed = self._busy = False
        self._turned_away: LifecycleError | None = None
        self._thread = threading.Thread(target=self._run, name="weightsync-steward", daemon=True)
        self._thread.start()

    @property
    def held(self) -> Held | str:
        """What is held, or why nothing is."""
        return self._held

    def step_aside(self, *, grace_s: float) -> None:
        """Serve nobody until `resume`; returns once the buffers are the caller's.

        Args:
            grace_s: seconds that a guest which is being served has for the rest; then it is turned away.

        Raises:
            DeadlineError: the transport does not come to an end.
        """

        def set_aside() -> None:
            self._aside = True

        self._watch.wake(set_aside)
        self._turn_away("a refit begins: join again after it", grace_s)

    def resume(self, held: Held | str) -> None:
        """Serve what is held from now on."""

        def change() -> None:
            self._held, self._aside = held, False

        self._watch.wake(change)

    def close(self) -> None:
        """Turn a guest away and end the thread. Idempotent.

        Raises:
            DeadlineError: the transport does not come to an end.
        """

        def change() -> None:
            self._closed = True

        self._watch.wake(change)
        self._turn_away("this rank leaves its process group", 0.0)
        self._thread.join(_END_S)
        self._guests.close()

    def _turn_away(self, why: str, grace_s: float) -> None:
        if self._is_free_within(grace_s):
            return
        self._turned_away = LifecycleError(f"a latecomer was not served to the end: {why}")
        self._guests.abort(self._turned_away)
        self._guests.end()
        if not self._is_free_within(_END_S):
            raise DeadlineError(f"serving a latecomer could not be ended within {_END_S:g} s", phase="serve")

    def _is_free_within(self, seconds: float) -> bool:
        return self._watch.until(lambda: None if self._busy else True, timeout_s=seconds) is not None

    # The thread.

    def _run(self) -> None:
        try:
            while self._await_guest():
                try:
                    self._serve()
                finally:
                    self._watch.wake(self._be_free)
        except LifecycleError as error:
            _log.debug("no more latecomers: %s", error)  # the hub was closed

    def _await_guest(self) -> bool:
        def probe() -> bool | None:
            if self._closed:
                return False
            self._guests.check()
            if self._aside or not self._guests.is_asked:
                return None
            self._busy = True
            return True

        while (found := self._watch.until(probe, timeout_s=_LOOK_S)) is None:
            pass
        return found

    def _be_free(self) -> None:
        self._busy = False

    def _serve(self) -> None:
        held, started, self._turned_away = self._held, time.monotonic(), None
        epoch, version = (held.epoch, held.version) if isinstance(held, Held) else (None, None)
        try:
            self._guests.begin(epoch=epoch, version=version, connect_s=_GREET_S)
        except WeightSyncError as error:
            _log.info("a latecomer knocked and did not come in: %s", error)
            return
        try:
            if not isinstance(held, Held):
                raise LifecycleError(f"nothing is held for latecomers: {held}", phase="serve")
            self._give(held)
            _log.info("served version %s to a latecomer in %.1f s", version, time.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - told to the guest; the next one may come
            _log.warning("a latecomer was not served: %s", self._turned_away or error)
            self._guests.abort(error)
        finally:
            self._guests.end()

    def _give(self, held: Held) -> None:
        refit = self._make_refit()
        if held.share != share_of(refit):
            raise LifecycleError("the policy ranks are others than in the last refit: run one first")
        outlet = Outlet(refit, [self._guests], Slots(0))
        timeout_s = refit.deadlines.connect_s
        try:
            refit.transport.open(sending=True, timeout_s=timeout_s, check=self._guests.check)
            for message in held.said:
                if isinstance(message, Bucket):
                    outlet.give(message)
                elif isinstance(message, Done):
                    outlet.tell_last(message)
                else:
                    outlet.tell(message)
            while not outlet.is_finished:
                self._await_answer(refit, outlet)
            self._guests.send(Complete())
        except Exception as error:
            refit.sign(error)
            raise
        finally:
            refit.transport.shut()

    def _await_answer(self, refit: Refit, outlet: Outlet) -> None:
        started = time.monotonic()
        if self._watch.until(outlet.take_in, timeout_s=refit.patience()) is None:
            raise outlet.overdue("serving a latecomer", time.monotonic() - started)
