"""The colocated engine: policy and inference engine live in one process, and the stream is handed over there.

Nothing is packed, sent or copied: the rollout side gets the policy's own tensors, batch by batch, and gives
each batch back by asking for the next one. Policy rank *i* and rollout rank *i* share a process; there may be
any number of such processes, whose policy ranks keep in step over the control channel.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import torch

from weightsync.control import ControlHub, Deadlines, Link
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.calls import (
    CallLock,
    not_prepared,
    require_joined,
    require_open,
    require_unjoined,
)
from weightsync.engines.handing import Handing, hand_over, take_over
from weightsync.engines.handover import Handover, Part
from weightsync.engines.housemates import Housemate, publish, read_housemates
from weightsync.engines.lockstep import make_lockstep, step_links
from weightsync.engines.stream import Weights, closing_stream
from weightsync.engines.telling import tell_unmet
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import ConfigurationError, IncompleteStreamError, LifecycleError, WeightSyncError
from weightsync.topology import AUTO, RankId

_CLOSE_S = 15.0
_UNUSED = frozenset({"device", "fan_out", "verify", "poison_released", "release_after_refit"})


class NaiveCheckpointEngine(CheckpointEngine):
    """Hands the weight stream over within the process: what ``refit_transport: null`` selects.

    Args:
        bucket_size: bytes of tensors in one batch; a larger tensor is a batch of its own.
        connect_s: seconds to wait for the other side at the beginning of a refit.
        stall_s: seconds without progress after which the other side is given up.
        total_s: seconds that a refit may take in all.
        silence_s: seconds without a sign of life after which another policy rank counts as lost.
        bind_host: address at which policy ranks meet each other; default: the host's outgoing interface.
        advertise_host: address that they are told; default: ``bind_host``.
        topology: ``"pairs"``, which ``"auto"`` is, too.
        unused: the other common settings (``device``, ``fan_out``, ``verify``, ``poison_released``,
            ``release_after_refit``), which mean nothing here: no bytes move, and no buffers exist.
    """

    transport_name = "naive"
    lacks: Mapping[str, str] = {
        "processes": "it hands tensors over within one process, which policy rank i and rollout rank i share",
        "hosts": "it hands tensors over within one process, and so on one host",
        "latecomers": "the weights pass from policy to engine as they are made, and nobody keeps them",
    }

    def __init__(
        self,
        bucket_size: int,
        *,
        connect_s: float = 60.0,
        stall_s: float = 300.0,
        total_s: float = 3600.0,
        silence_s: float = 15.0,
        bind_host: str | None = None,
        advertise_host: str | None = None,
        topology: str = "pairs",
        **unused: Any,
    ) -> None:
        if bucket_size < 1:
            raise ConfigurationError(f"bucket_size must be at least 1 byte, got {bucket_size}")
        if topology not in ("pairs", AUTO):
            raise ConfigurationError(
                f"topology {topology!r} needs a transport; within one process write 'pairs' or 'auto'"
            )
        if unknown := sorted(set(unused) - _UNUSED):
            raise ConfigurationError(f"the colocated engine does not take {', '.join(map(repr, unknown))}")
        self.bucket_size = bucket_size
        self._deadlines = Deadlines(
            connect_s=connect_s, stall_s=stall_s, total_s=total_s, silence_s=silence_s
        )
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        self._waiter = Waiter()
        self._calls = CallLock()
        self._stats: dict[str, float] = {}
        self._next: tuple[int | None, int | None] = (None, None)
        self._closed = False
        self._handing: Handing | None = None
        self._own: Housemate | None = None
        self._hub: ControlHub | None = None
        self._handover: Handover | None = None
        self._step_links: list[Link] = []
        self._who: RankId | None = None

    # Setting up.

    def refuses(self, *, train_world_size: int, rollout_world_size: int) -> str | None:
        """Return why so many workers cannot be colocated; each rollout rank needs a policy rank beside it."""
        if rollout_world_size <= train_world_size:
            return None
        return (
            f"each rollout rank shares a process with the policy rank of the same number, but there are "
            f"{rollout_world_size} rollout and {train_world_size} policy workers: add policy workers, or "
            f"name a refit_transport"
        )

    def prepare(self) -> dict[str, Any]:
        """Open a new session; returns plain data for the peers.

        Raises:
            LifecycleError: the engine is closed, or another call is running.
        """
        with self._calls.hold("prepare"):
            require_open(closed=self._closed)
            self._leave("the other side's engine has been prepared again: connect both sides anew")
            self._hub = ControlHub(
                self.transport_name,
                bind_host=self._bind_host,
                advertise_host=self._advertise_host,
                deadlines=self._deadlines,
            )
            self._handover = Handover()
            self._own = Housemate.describe(
                self.transport_name, self.bucket_size, publish(self._handover), self._hub.card()
            )
            return self._own.to_dict()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Find the rollout rank of the same number in this process, and the other policy ranks.

        Raises:
            ConfigurationError: it is in another process, or the metadata are not this engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        with self._joining(RankId("policy", worker_rank), train_world_size, rollout_world_size) as (
            read,
            hub,
        ):
            entries = read(metadata)
            policy, rollout = entries[:train_world_size], entries[train_world_size:]
            partner = RankId("rollout", worker_rank)
            self._handover = rollout[worker_rank].handover(partner) if worker_rank < len(rollout) else None
            self._step_links = step_links(
                worker_rank,
                train_world_size,
                dial=lambda peer: hub.connect(policy[peer.rank].card(str(peer))),
                answer=lambda peer: hub.accept(policy[peer.rank].card(str(peer))),
            )

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Check that the policy rank of the same number is in this process.

        Raises:
            ConfigurationError: it is not, or the metadata are not this engine's.
            LifecycleError: the engine is not prepared, or has joined a process group already.
        """
        who = RankId("rollout", rollout_rank)
        with self._joining(who, train_world_size, rollout_world_size) as (read, hub):
            read(metadata)[rollout_rank].require_here(RankId("policy", rollout_rank))
            hub.close()  # only policy ranks keep in step

    # One refit.

    def open_refit(self, *, epoch: int, version: int, receivers: Sequence[int] | None = None) -> None:
        """Name the next refit; a side that names another is not met.

        Raises:
            ConfigurationError: only some rollout ranks are to take part.
        """
        super().open_refit(epoch=epoch, version=version, receivers=receivers)
        self._next = (epoch, version)

    async def send_weights(self, weights: Weights) -> None:
        """Hand a weight stream over; returns once the other side has taken everything.

        The generator runs in this thread, one item at a time; it is consumed once and closed. A rank without
        a partner keeps its stream in step with the others.

        Raises:
            WeightSyncError: with peer, phase and bytes so far where they are known.
        """
        with (
            closing_stream(weights),
            self._calls.hold("send_weights"),
            self._taking_part("policy") as handing,
        ):
            # Another rank may have to wait for its receiver, first to come and then to take a batch.
            patience_s = self._deadlines.connect_s + self._deadlines.stall_s
            rank, links = handing.part.who.rank, self._step_links
            lockstep = make_lockstep(rank, links, self._waiter, handing.budget, patience_s)
            try:
                await lockstep.begin(partial(self._meet_step, handing))
                await hand_over(handing, weights, self.bucket_size, lockstep)
            except BaseException as error:
                lockstep.stop(handing.sign(error))
                raise
            finally:
                lockstep.end()

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of ``(name, tensor)``, the policy's own; valid until the next batch is asked for.

        Raises:
            WeightSyncError: the sender failed or did not come, or the stream is not what was promised.
        """
        with self._calls.hold("receive_weight_batches"), self._taking_part("rollout") as handing:
            async with aclosing(take_over(handing, self.manifest_check)) as batches:
                async for batch in batches:
                    yield batch
                    del batch  # a tensor that the policy made for this must be gone before the next is made

    def abort_refit(self, error: BaseException) -> None:
        """Tell the other side, and the other policy ranks, why this one failed.

        Before this side has begun the refit that `open_refit` named, it tells those that wait for it.
        """
        if self._who is None:
            return
        if isinstance(error, WeightSyncError):
            error.with_context(side=self._who.side, rank=self._who.rank)
        handing = self._handing
        if handing is not None:
            self._tell(handing, error)
        elif self._next[0] is not None:
            (epoch, version), self._next = self._next, (None, None)
            if self._handover is not None:
                self._handover.refuse(self._who, epoch, version, error)
            tell_unmet(self._step_links, error, epoch=epoch, version=version)

    def refit_stats(self) -> dict[str, float]:
        """Return the last complete refit's bytes, tensors, batches and ``seconds_<phase>``."""
        return dict(self._stats)

    # Tearing down.

    def finalize(self) -> None:
        """Keep the peers for the next refit.

        Raises:
            LifecycleError: a refit is running.
        """
        with self._calls.hold("finalize"):
            self._next = (None, None)

    def close(self) -> None:
        """Leave the peers. Idempotent. A refit that runs in another thread is aborted first.

        Raises:
            LifecycleError: a refit runs in this thread, or does not end.
        """
        handing = self._handing
        if handing is not None:
            text = "the engine was closed during a refit"
            self._tell(handing, LifecycleError(text))
            handing.part.inbox.fail(lambda: LifecycleError(text))
            if self._hub is not None:
                self._hub.close()  # wakes what waits for another policy rank
        with self._calls.hold("close", patience_s=_CLOSE_S):
            self._closed = True
            self._waiter.close()
            self._leave("the other side's engine was closed")

    # Pieces.

    @contextmanager
    def _joining(self, who: RankId, train: int, rollout: int) -> Iterator[tuple[Any, ControlHub]]:
        """Join a process group whole or not at all: after a failure the engine is to be prepared again."""
        with self._calls.hold(f"init_{who.side}_process_group"):
            own, hub = self._own, self._hub
            if own is None or hub is None:
                raise not_prepared()
            require_unjoined(self._who)
            if (reason := self.refuses(train_world_size=train, rollout_world_size=rollout)) is not None:
                raise ConfigurationError(reason)
            try:
                yield partial(read_housemates, own=own, who=who, worlds=(train, rollout)), hub
                self._who = who
            except BaseException:
                self._leave("the other side could not connect")
                raise

    @contextmanager
    def _taking_part(self, side: str) -> Iterator[Handing]:
        """Take part in the refit that was opened; a failure is told to whoever is in it or waits for it."""
        who = require_joined(self._who, side)
        (epoch, version), self._next = self._next, (None, None)
        handing = self._handing = Handing(
            part=Part(who, epoch, version),
            handover=self._handover,
            peer=str(RankId("rollout" if side == "policy" else "policy", who.rank)),
            deadlines=self._deadlines,
            budget=Budget(self._deadlines.total_s),
            unmet=list(self._step_links),
        )
        failure: BaseException | None = None
        try:
            yield handing
            self._stats = handing.figures()
        except GeneratorExit:
            failure = IncompleteStreamError("the consumer stopped before the end of the stream")
            raise
        except BaseException as error:
            failure = handing.sign(error)
            raise
        finally:
            self._handing = None
            if handing.handover is not None:
                handing.handover.leave(handing.part, failure)
            if failure is not None:
                tell_unmet(handing.unmet, failure, epoch=epoch, version=version)

    async def _meet_step(self, handing: Handing, link: Link) -> None:
        """Open this refit together with another policy rank."""
        handing.unmet.remove(link)
        begin = partial(link.begin, epoch=handing.part.epoch, version=handing.part.version)
        with handing.stopwatch.phase("connect"):
            await self._waiter.run(begin, undo=link.end)

    def _tell(self, handing: Handing, error: BaseException) -> None:
        if handing.handover is not None:
            handing.handover.tell(handing.part, error)
        for link in self._step_links:
            link.abort(error)

    def _leave(self, reason: str) -> None:
        hub, self._hub = self._hub, None
        handover, self._handover = self._handover, None
        self._own, self._who, self._step_links = None, None, []
        if handover is not None:
            handover.close(reason)
        if hub is not None:
            hub.close()
