"""What the ranks have said of their shares of the weights, before a refit by regions: who reads what, and
which tensors cannot be moved by regions, with the reasons.

The workers keep their layouts to themselves and exchange them as metadata; the driver hears no more than it
needs to refuse what cannot work, and to report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import inf
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.cluster.base import PendingCall, WorkerGroup
from weightsync.config import RefitConfig
from weightsync.crew import Crew, Deadline, require_complete
from weightsync.errors import ConfigurationError, ManifestError, ProtocolError
from weightsync.failures import list_ranks
from weightsync.report import list_reasons
from weightsync.tensors import TensorSpec, list_names
from weightsync.topology import RankId

PHASE = "layout"
_Mask = NDArray[np.bool_]
_log = logging.getLogger(__name__)


class Shares:
    """Asks the ranks for their shares, once their engines are made and before those prepare.

    Args:
        config: says whether, and for which tensors.

    Attributes:
        whole: the tensors that take the full path, in the order of the stream, each with the reason and the
            first rank that gave it.
    """

    def __init__(self, config: RefitConfig) -> None:
        self.sharding = config.sharding
        self.whole: Mapping[str, str] = {}
        self._allow_unused = config.lifecycle.allow_unused
        self._manifest = b""
        self._digest = ""
        self._index: dict[str, int] = {}
        self._whole: dict[RankId, _Mask] = {}
        self._unread: dict[RankId, _Mask] = {}
        self._reasons: dict[tuple[str, int], str] = {}

    def learn(
        self,
        crew: Crew,
        deadline: Deadline,
        *,
        step_s: float = inf,
        policy: Collection[int] | None = None,
        rollout: Collection[int] | None = None,
    ) -> None:
        """Ask workers, policy workers first; nothing where no tensor is moved by regions.

        Args:
            crew: that can be reached.
            deadline: of all of it.
            step_s: seconds for each side.
            policy: the ranks to ask; by default all.
            rollout: the first ranks of the engine hosts to ask; by default all.

        Raises:
            StepError: a worker could not say.
            ManifestError: policy ranks would send different tensors, or nobody reads one of them.
            ConfigurationError: all tensors must be moved by regions, and one cannot.
        """
        if self.sharding == "none":
            return
        if policy is None or policy:
            arguments: dict[str, Any] = {"sharding": self.sharding}
            call = _submit(crew.policy, "describe_weights", arguments, policy)
            answers = crew.require(PHASE, call, deadline=Deadline(min(step_s, deadline.left_s())))
            if policy is None:
                require_complete(answers, crew.policy, PHASE)
            self._take_policy(answers.values, anew=policy is None)
        if rollout is None or rollout:
            arguments = {"manifest": self._manifest, "sharding": self.sharding}
            call = _submit(crew.rollout, "describe_layout", arguments, rollout)
            answers = crew.require(PHASE, call, deadline=Deadline(min(step_s, deadline.left_s())))
            if rollout is None:
                require_complete(answers, crew.rollout, PHASE)
            self._take_rollout(answers.values)
        self._conclude()

    def insert(self, rank: int, count: int) -> None:
        """Let the rollout ranks from this one on move back, behind new ones."""
        self._renumber(lambda old: old + count if old >= rank else old)

    def remove(self, rank: int, count: int) -> None:
        """Forget rollout ranks that have left; those behind them move up."""
        for gone in range(rank, rank + count):
            self._whole.pop(RankId("rollout", gone), None)
            self._unread.pop(RankId("rollout", gone), None)
        self._renumber(lambda old: old - count if old >= rank + count else old)

    def _renumber(self, now: Callable[[int], int]) -> None:
        def renamed(masks: dict[RankId, _Mask]) -> dict[RankId, _Mask]:
            return {
                RankId(who.side, now(who.rank) if who.side == "rollout" else who.rank): mask
                for who, mask in masks.items()
            }

        self._whole, self._unread = renamed(self._whole), renamed(self._unread)

    def _take_policy(self, said: Mapping[RankId, Any], *, anew: bool) -> None:
        digests = {who: _field(who, value, "digest", str) for who, value in sorted(said.items())}
        if anew:
            first = RankId("policy", 0)
            self._start(_field(first, said[first], "manifest", bytes), digests[first])
        differ = [who for who, digest in digests.items() if digest != self._digest]
        if differ:
            than = "policy rank 0" if anew else "the others were connected for"
            raise ManifestError(
                f"{list_ranks(differ)} would send other tensors than {than}: names, shapes, dtypes or their "
                "order differ; let weight_stream() give the same on every policy rank",
                side="policy", rank=differ[0].rank, phase=PHASE,
            )  # fmt: skip
        self._take_whole(said)

    def _start(self, manifest: bytes, digest: str) -> None:
        """Forget what was said of other tensors."""
        if (manifest, digest) == (self._manifest, self._digest):
            return
        try:
            specs = msgspec.msgpack.decode(manifest, type=tuple[TensorSpec, ...])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed manifest: {error}", side="policy", rank=0, phase=PHASE) from error
        self._manifest, self._digest = manifest, digest
        self._index = {spec.name: index for index, spec in enumerate(specs)}
        self._whole, self._unread, self._reasons = {}, {}, {}

    def _take_rollout(self, said: Mapping[RankId, Any]) -> None:
        self._take_whole(said)
        for who, value in said.items():
            self._unread[who] = self._mask(who, _field(who, value, "unread", (list, tuple)))

    def _take_whole(self, said: Mapping[RankId, Any]) -> None:
        for who in sorted(said, reverse=True):  # of several reasons, the first rank's is kept
            whole = _field(who, said[who], "whole", dict)
            self._whole[who] = self._mask(who, whole)
            self._reasons |= {(who.side, self._index[name]): str(reason) for name, reason in whole.items()}

    def _mask(self, who: RankId, names: Iterable[Any]) -> _Mask:
        mask = np.zeros(len(self._index), np.bool_)
        try:
            mask[[self._index[name] for name in names]] = True
        except (KeyError, TypeError) as error:
            raise _malformed(who, f"it names a tensor that is not in the manifest: {error}") from error
        return mask

    def _conclude(self) -> None:
        """Check what all ranks together have said.

        Raises:
            ManifestError: nobody reads a tensor.
            ConfigurationError: all are to be moved by regions, and one cannot.
        """
        names = list(self._index)
        told = {names[index]: self._teller(index) for index in np.flatnonzero(_any(self._whole, len(names)))}
        self.whole = {name: f"{reason} ({who})" for name, (who, reason) in told.items()}
        unread = np.logical_and.reduce([*self._unread.values()]) if self._unread else np.zeros(0, np.bool_)
        self._require_read(names[index] for index in np.flatnonzero(unread))
        if self.sharding == "all" and told:
            who, _ = next(iter(told.values()))
            raise ConfigurationError(
                f"shard_weights: all, but {len(told)} of {len(names)} tensors cannot be moved by regions: "
                f"{list_reasons(self.whole)}; write shard_weights: auto, which sends these whole",
                side=who.side, rank=who.rank, phase=PHASE,
            )  # fmt: skip
        if told:
            _log.info(
                "shard_weights: %s: %d of %d tensors take the full path: %s",
                self.sharding, len(told), len(names), list_reasons(self.whole),
            )  # fmt: skip

    def _teller(self, index: int) -> tuple[RankId, str]:
        """Return who says first that a tensor goes whole, and why."""
        who = min(who for who, mask in self._whole.items() if mask[index])
        return who, self._reasons[who.side, index]

    def _require_read(self, unread: Iterator[str]) -> None:
        unknown = [
            name
            for name in unread
            if name not in self.whole
            and not any(fnmatchcase(name, pattern) for pattern in self._allow_unused)
        ]
        if unknown:
            raise ManifestError(
                f"no rollout rank has a place for {list_names(unknown)}: the served model lacks them; name "
                "what may come unused in refit_lifecycle.allow_unused, or do not send it",
                side="rollout", rank=min(self._unread).rank, phase=PHASE, tensor=unknown[0],
            )  # fmt: skip


def _any(masks: Mapping[RankId, _Mask], count: int) -> _Mask:
    found: _Mask = np.logical_or.reduce([np.zeros(count, np.bool_), *masks.values()])
    return found


def _submit(
    group: WorkerGroup, method: str, kwargs: Mapping[str, Any], only: Collection[int] | None
) -> PendingCall:
    return group.submit(method, kwargs) if only is None else group.submit(method, kwargs, only=only)


def _field(who: RankId, value: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, kind):
        raise _malformed(who, f"{key} is {found!r:.80}")
    return found


def _malformed(who: RankId, why: str) -> ProtocolError:
    return ProtocolError(f"malformed answer: {why}", side=who.side, rank=who.rank, phase=PHASE)
