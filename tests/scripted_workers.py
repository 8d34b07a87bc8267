"""Fake workers that follow a script: no engine, no bytes, but the state that the worker protocol describes.

A script maps a method or an action to what is done instead: a function of the keyword arguments, which
returns the value or raises. For one rank of a host, key it ``(method, local_rank)``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from weightsync.errors import LifecycleError
from weightsync.outcomes import run_for_outcome

Script = dict[Any, Callable[[dict[str, Any]], Any]]

TRANSFER = {
    "update_weights_from_checkpoint_engine",
    "load_staged_weights",
    "send_weights_via_checkpoint_engine",
}
GIB = 1 << 30


class CallLog:
    """Calls in the order in which they began, from all workers."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def add(self, who: str, method: str, kwargs: dict[str, Any]) -> None:
        with self._lock:
            self.entries.append((who, method, kwargs))

    def methods(self, who: str | None = None) -> list[str]:
        return [method for name, method, _ in self.entries if who in (None, name)]

    def count(self, method: str, who: str | None = None) -> int:
        return self.methods(who).count(method)

    def kwargs(self, who: str, method: str) -> list[dict[str, Any]]:
        return [kwargs for name, called, kwargs in self.entries if (name, called) == (who, method)]

    def clear(self) -> None:
        self.entries.clear()


class ScriptedPolicyWorker:
    def __init__(self, rank: int, script: Script | None = None, log: CallLog | None = None) -> None:
        self.rank = rank
        self.script = script or {}
        self.log = log or CallLog()

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict | None = None) -> dict:
        kwargs = method_kwargs or {}
        self.log.add(f"policy {self.rank}", checkpoint_method, kwargs)
        return run_for_outcome(
            "policy", self.rank, checkpoint_method, lambda: self._do(checkpoint_method, kwargs)
        )

    def pid(self) -> int:
        return os.getpid()

    def calls(self) -> list[str]:
        return self.log.methods()

    def _do(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method in self.script:
            return self.script[method](kwargs)
        if method == "checkpoint_engine_total_memory_bytes":
            return GIB
        if method == "prepare_checkpoint_engine":
            return f"policy {self.rank}"
        if method == "send_weights_via_checkpoint_engine":
            return figures(gather=0.1, pack=0.2, wait=0.3, total=0.6)
        return None


class ScriptedRank:
    """The state of one rollout rank."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.prefix = 0
        self.version: int | None = None
        self.dirty = False
        self.fenced: str | None = None
        self.highest: int | None = None
        self.staged = False

    @property
    def rank(self) -> int:
        return self.prefix + self.local_rank

    def checkpoint_engine_total_memory_bytes(self, device: str) -> int:
        return GIB

    def init_checkpoint_engine(self, **kwargs: Any) -> None:
        pass

    def prepare_checkpoint_engine(self) -> str:
        return f"local {self.local_rank}"

    def init_checkpoint_engine_process_group(self, rank_prefix: int, **kwargs: Any) -> None:
        self.prefix = rank_prefix

    def open_refit(self, epoch: int, version: int, receivers: list[int] | None = None) -> None:
        if self.version is not None and version <= self.version:
            raise LifecycleError(f"version {version} does not follow {self.version}")

    def update_weights_from_checkpoint_engine(self) -> dict[str, Any]:
        self.dirty = True
        return figures(receive=0.4, load=0.1, total=0.5)

    def stage_weights_from_checkpoint_engine(self) -> dict[str, Any]:
        self.staged = True
        return figures(receive=0.4, stage=0.1, total=0.5) | {"staged_bytes": 3000}

    def load_staged_weights(self) -> dict[str, Any]:
        if not self.staged:
            raise LifecycleError("nothing is staged")
        self.staged, self.dirty = False, True
        return figures(receive=0.4, stage=0.1, load=0.2, total=0.7) | {"staged_bytes": 3000}

    def weight_digest(self, tensors: bool = False) -> dict[str, Any]:
        return {**self.refit_status(), "served": {"total": f"served {self.version}"}, "stream": None}

    def commit_refit(self, version: int) -> int:
        self.highest = version
        self.version, self.dirty, self.fenced = version, False, None
        return version

    def fence_refit(self, reason: str) -> None:
        self.staged = False
        if self.dirty:
            self.version, self.fenced = None, reason

    def finalize_checkpoint_engine(self) -> None:
        pass

    def close_checkpoint_engine(self) -> None:
        pass

    def refit_status(self) -> dict[str, Any]:
        status = {"version": self.version, "dirty": self.dirty, "fenced": self.fenced}
        return status if self.highest is None else status | {"highest": self.highest}


class RestartingRank(ScriptedRank):
    """A rank that insists on its engine, and whose worker may be started anew behind the same handle."""

    made = False

    def restart(self) -> None:
        self.__init__(self.local_rank)
        self.made = False

    def init_checkpoint_engine(self, **kwargs: Any) -> None:
        self.made = True

    def prepare_checkpoint_engine(self) -> str:
        self._require_engine()
        return super().prepare_checkpoint_engine()

    def open_refit(self, epoch: int, version: int, receivers: list[int] | None = None) -> None:
        self._require_engine()
        super().open_refit(epoch, version, receivers)

    def _require_engine(self) -> None:
        if not self.made:
            raise LifecycleError("init_checkpoint_engine comes first")


class ScriptedEngineHost:
    def __init__(
        self,
        world_size: int = 1,
        script: Script | None = None,
        log: CallLog | None = None,
        name: str = "host 0",
    ) -> None:
        self.ranks = [ScriptedRank(local) for local in range(world_size)]
        self.script = script or {}
        self.log = log or CallLog()
        self.name = name
        self.prefix = 0

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict | None = None) -> list[dict]:
        kwargs = method_kwargs or {}
        self.log.add(self.name, checkpoint_method, kwargs)
        return [self._rank_outcome(rank, checkpoint_method, kwargs) for rank in self.ranks]

    def refit_control(self, action: str, kwargs: dict | None = None) -> dict:
        self.log.add(self.name, action, kwargs or {})
        return run_for_outcome("rollout", self.prefix, action, lambda: self._control(action, kwargs or {}))

    def pid(self) -> int:
        return os.getpid()

    def calls(self) -> list[str]:
        return self.log.methods()

    def _rank_outcome(self, rank: ScriptedRank, method: str, kwargs: dict[str, Any]) -> dict:
        scripted = self.script.get((method, rank.local_rank), self.script.get(method))
        call = (lambda: scripted(kwargs)) if scripted else (lambda: getattr(rank, method)(**kwargs))
        outcome = run_for_outcome("rollout", rank.rank, method, call)
        if scripted and method in TRANSFER:
            rank.dirty = True
        return outcome

    def _control(self, action: str, kwargs: dict[str, Any]) -> Any:
        if action in self.script:
            return self.script[action](kwargs)
        if action == "describe":
            return {"world_size": len(self.ranks), "pid": os.getpid()}
        if action == "assign_ranks":
            self.prefix = kwargs["rank_prefix"]
        return None


def figures(**seconds: float) -> dict[str, Any]:
    return {"bytes": 3000, "tensors": 7, "batches": 2, "seconds": seconds}


def raising(error: Exception) -> Callable[[dict[str, Any]], Any]:
    """Return a scripted method that raises a fresh copy of nothing but this error."""

    def method(kwargs: dict[str, Any]) -> Any:
        raise error

    return method


def sleeping(seconds: float, value: Any = None) -> Callable[[dict[str, Any]], Any]:
    def method(kwargs: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return value

    return method
