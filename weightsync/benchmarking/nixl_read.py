"""What NIXL alone can do: one read of all registered parameters, into the served ones."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from weightsync.benchmarking.baselines import KIND
from weightsync.benchmarking.crew import ANSWER_S, Crew, ProcessCrew, ask
from weightsync.benchmarking.shapes import ModelHandle, Parameters
from weightsync.benchmarking.trial import BenchSettings, Trial
from weightsync.benchmarking.workers import Holder, Stretch
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.engines.nixl_params import backend_params, reading_threads
from weightsync.engines.nixl_ticker import ProgressTicker
from weightsync.engines.regions.reading import Spans
from weightsync.engines.waiting import await_ended

_BACKEND = "UCX"
_PIECE_BYTES = 4 << 20
_POLLS_S = (0.0001, 0.0005)


class ReadWorker(Holder):
    """Lends the policy's parameters, or reads them; no checks, no messages."""

    def lend(self, sending: bool) -> tuple[bytes, list[int]]:
        """Register this rank's parameters; returns NIXL's metadata, and their addresses."""
        own = self.policy if sending else self.served
        params = backend_params(_BACKEND, None, threads=reading_threads("cpu", "all"))
        self._agent = NixlAgent(_BACKEND, params)
        self._lent = self._agent.register_all(list(own.values()))
        self._ticker = ProgressTicker(self._agent, next(iter(own.values())).device)
        if sending:
            self._ticker.start()
        return self._agent.metadata(), _addresses(own)

    def meet(self, metadata: bytes, addresses: list[int]) -> None:
        """Prepare the read of a peer's parameters."""
        peer = self._agent.add_peer(metadata)
        sizes = np.array([tensor.nbytes for tensor in self.served.values()], np.int64)
        spans = Spans(np.array(addresses, np.int64), np.array(_addresses(self.served), np.int64), sizes)
        spans = spans.cut(_PIECE_BYTES)
        source, target = (
            np.stack((at, spans.nbytes, np.zeros_like(at)), axis=1).astype(np.uint64)
            for at in (spans.remote, spans.local)
        )
        self._read = self._agent.prepare_read(peer, source, target, ("DRAM", "DRAM"))

    def read(self) -> Stretch:
        """Read everything once."""
        start = time.perf_counter()
        self._read.start()
        what = "a read of all parameters"
        await_ended(
            self._read.has_ended, timeout_s=ANSWER_S, check=lambda: None, what=what, pauses_s=_POLLS_S
        )
        end = time.perf_counter()
        return Stretch("rollout", start, end, {"fetch": end - start}, {"bytes_moved": self.stored_bytes()})

    def leave(self) -> None:
        """Let go of everything."""
        self._ticker.stop()
        if hasattr(self, "_read"):
            self._read.release()
        self._agent.deregister(self._lent)


class ReadTrial(Trial):
    """Every rollout rank reads all parameters of policy rank 0: by regions, without what a refit needs."""

    kind, name = KIND, "bare NIXL read"
    whole_only = True

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings

    def crew(self, model: ModelHandle) -> AbstractContextManager[Crew]:
        """Return one policy process and the rollout processes."""
        settings = self._settings
        return ProcessCrew(ReadWorker, model, 1, settings.rollout_ranks, threads=settings.threads)

    def begin(self, crew: Crew) -> None:
        """Register, and learn what is read."""
        lent: list[Any] = ask(crew.policy, "lend", True)
        ask(crew.rollout, "lend", False)
        ask(crew.rollout, "meet", *lent[0])

    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Read."""
        return ask(crew.rollout, "read")

    def end(self, crew: Crew) -> None:
        """Deregister, the readers first."""
        ask(crew.rollout, "leave")
        ask(crew.policy, "leave")


def _addresses(parameters: Parameters) -> list[int]:
    return [tensor.data_ptr() for tensor in parameters.values()]
