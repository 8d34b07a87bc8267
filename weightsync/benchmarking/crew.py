"""The processes of a benchmark, as the one that measures sees them: asked, waited for, always ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from weightsync.benchmarking.memory import together
from weightsync.benchmarking.shapes import WHOLE, ModelHandle, Part
from weightsync.benchmarking.workers import Holder, Stretch
from weightsync.errors import DeadlineError, ErrorRecord, PeerLostError

ANSWER_S = 300.0
_END_S = 10.0
_LAST_WORDS = 2000


class Member(Protocol):
    """One process of a crew."""

    def start(self, method: str, *args: Any) -> None:
        """Ask for a method of its `Holder` without waiting."""

    def result(self) -> Any:
        """Wait for what the method returns; its error is raised here."""


def ask(members: Iterable[Member], method: str, *args: Any) -> list[Any]:
    """Have several members run a method at once; returns what each returned."""
    asked = list(members)
    for member in asked:
        member.start(method, *args)
    return [member.result() for member in asked]


def spanned(stretches: Iterable[Stretch]) -> float:
    """Return the seconds from the first beginning to the last end."""
    found = list(stretches)
    return max(each.end for each in found) - min(each.start for each in found)


class Crew:
    """Policy and rollout ranks. A process that both sides share is in both lists.

    Args:
        policy: by rank.
        rollout: by rank.
        parts: of each parameter, that the rollout ranks serve; empty if all of it.
    """

    def __init__(
        self, policy: Sequence[Member], rollout: Sequence[Member], *, parts: Sequence[Part] = ()
    ) -> None:
        self.policy, self.rollout = list(policy), list(rollout)
        self._parts = list(parts) or [WHOLE] * len(self.rollout)
        self._promised: dict[Part, str] = {}

    @property
    def members(self) -> list[Member]:
        """Every process, once."""
        return list(dict.fromkeys([*self.policy, *self.rollout]))

    def copy(self) -> float:
        """Have every rollout rank copy the parameters, all at once; returns the seconds."""
        return spanned(ask(self.rollout, "copy"))

    def wipe(self) -> None:
        """Overwrite what is served."""
        ask(self.rollout, "wipe")

    def wrong_ranks(self) -> list[int]:
        """Return the rollout ranks whose served parameters are not, byte by byte, the policy's."""
        for part in self._parts:
            if part not in self._promised:
                self._promised[part] = str(ask(self.policy[:1], "policy_digest", part)[0])
        found = zip(ask(self.rollout, "served_digest"), self._parts, strict=True)
        return [rank for rank, (digest, part) in enumerate(found) if digest != self._promised[part]]

    def least_bytes(self) -> list[int]:
        """Return what each rollout rank stores."""
        return ask(self.rollout, "stored_bytes")

    def mark(self) -> None:
        """Count extra memory from here."""
        ask(self.members, "mark")

    def extra_memory(self) -> int:
        """Return the most memory that all processes together have had above the mark."""
        return together(ask(self.members, "memory"))

    def mark_connected(self) -> None:
        """Count what refits take on top from here."""
        ask(self.members, "mark_connected")

    def refit_memory(self) -> int:
        """Return the most memory that all processes together have had above that."""
        return together(ask(self.members, "refit_memory"))


@dataclass(frozen=True)
class Role:
    """What a process holds.

    Attributes:
        holder: class of it.
        model: where the policy's parameters are.
        sides: ``"policy"``, ``"rollout"`` or both.
        threads: of torch.
        part: of each parameter, that it serves.
    """

    holder: type[Holder]
    model: ModelHandle
    sides: tuple[str, ...]
    threads: int
    part: Part = WHOLE

    def make(self) -> Holder:
        """Make it."""
        return self.holder(self.model, self.sides, self.threads, self.part)


class Process:
    """A `Holder` in a process of its own; ``name`` is for error texts."""

    def __init__(self, name: str, role: Role) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "weightsync.benchmarking.workers"])
        self._name = name
        descriptor, path = tempfile.mkstemp(prefix="weightsync-bench-")
        os.close(descriptor)
        self._output = Path(path)
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, path, role), daemon=True)
        self._process.start()
        far.close()

    def start(self, method: str, *args: Any) -> None:
        """Ask for a method without waiting."""
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise self._lost() from error

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            PeerLostError: the process has died.
            DeadlineError: it does not answer.
        """
        if not self._pipe.poll(ANSWER_S):
            raise DeadlineError(f"{self._name} did not answer within {ANSWER_S:g} s")
        try:
            value, failure = self._pipe.recv()
        except EOFError as error:
            raise self._lost() from error
        if failure is not None:
            raise ErrorRecord.from_dict(failure).to_exception()
        return value

    def end(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        self._process.join(_END_S / 10)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_END_S)
        self._output.unlink(missing_ok=True)

    def _lost(self) -> PeerLostError:
        self._process.join(1.0)
        printed = self._output.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
        said = f"; it printed: {printed}" if printed else ""
        return PeerLostError(f"{self._name} died (exit code {self._process.exitcode}){said}")


class ProcessCrew(Crew):
    """A crew of processes of their own, ended at the end of the ``with`` block.

    Args:
        holder: class of what each holds.
        model: where the policy's parameters are.
        policy: number of policy ranks.
        rollout: number of rollout ranks.
        threads: of torch in each.
        tensor_parallel: rollout ranks that share each parameter; 1 if each serves all of it.
        together: policy rank *i* and rollout rank *i* share a process.
    """

    def __init__(
        self,
        holder: type[Holder],
        model: ModelHandle,
        policy: int,
        rollout: int,
        *,
        threads: int,
        tensor_parallel: int = 1,
        together: bool = False,
    ) -> None:
        self._processes: list[Process] = []
        parts = [Part(rank % tensor_parallel, tensor_parallel) for rank in range(rollout)]

        def make(side: str, rank: int, sides: tuple[str, ...]) -> Process:
            part = parts[rank] if "rollout" in sides else WHOLE
            process = Process(f"{side} rank {rank}", Role(holder, model, sides, threads, part))
            self._processes.append(process)
            return process

        try:
            shared = rollout if together else 0
            senders = [
                make("policy", rank, ("policy", "rollout") if rank < shared else ("policy",))
                for rank in range(policy)
            ]
            receivers = (
                senders[:rollout] if together else [make("rollout", r, ("rollout",)) for r in range(rollout)]
            )
        except BaseException:
            self.end()
            raise
        super().__init__(senders, receivers, parts=parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End every process."""
        for process in self._processes:
            process.end()


def end_helpers() -> None:
    """End the process that the others were forked from. Without it, it ends with this one."""
    stop = getattr(forkserver._forkserver, "_stop", None)
    if stop is not None:
        stop()


def _serve(pipe: Connection, output: str, role: Role) -> None:
    """Answer until the pipe is closed. Ctrl-C is for the parent, whose death is this one's end, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What transport libraries print belongs neither into the tables nor into the JSON.
    with Path(output).open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    _end_with_parent()
    worker: Holder | None = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            worker = worker or role.make()
            pipe.send((getattr(worker, method)(*args), None))
        except Exception as error:  # noqa: BLE001 - raised again by the one who asked
            pipe.send((None, ErrorRecord.from_exception(error).to_dict()))


def _end_with_parent() -> None:
    parent = mp.parent_process()

    def watch() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, name="weightsync-bench-parent", daemon=True).start()
