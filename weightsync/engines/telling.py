"""Tells the peers of a refit that it has failed: those that are in it, and those that still wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from weightsync.control import Link
from weightsync.errors import WeightSyncError

_MEET_S = 1.0
_AT_ONCE = 32


def tell_unmet(
    links: Sequence[Link], error: BaseException, *, epoch: int | None, version: int | None
) -> None:
    """Open the refit with the peers that wait for it, then abort it; returns in about two seconds.

    Peers that are not there, or are there for another epoch, are passed over. Links with an open refit are
    aborted at once.
    """
    if not links:
        return
    end = time.monotonic() + _MEET_S

    def tell(link: Link) -> None:
        left = end - time.monotonic()
        if left > 0:
            with contextlib.suppress(WeightSyncError):  # not there, or in this refit already
                link.begin(epoch=epoch, version=version, connect_s=left)
        link.abort(error)

    _at_once(tell, links)


def tell_all(links: Sequence[Link], error: BaseException) -> None:
    """Abort the refit that is open on the links; returns in about a second."""
    if len(links) == 1:
        links[0].abort(error)
    elif links:
        _at_once(lambda link: link.abort(error), links)


def _at_once(tell: Callable[[Link], None], links: Sequence[Link]) -> None:
    with ThreadPoolExecutor(min(len(links), _AT_ONCE), thread_name_prefix="weightsync-tell") as pool:
        list(pool.map(tell, links))
