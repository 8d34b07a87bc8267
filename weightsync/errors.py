"""Every exception that weightsync raises on purpose, and how one travels between processes.

::

    WeightSyncError
    ├── ConfigurationError            a setting, a name or an argument is wrong; nothing was started
    │   └── MissingDependencyError    an optional package is absent; names the extra to install
    ├── LifecycleError                a call out of order: refit before init, two at once, after shutdown
    │   └── WorkerFencedError         a rollout worker refuses to serve until a complete refit
    ├── StreamError                   what was sent is not what was promised or what the model takes
    │   ├── ManifestError             unknown, missing, repeated, misshapen or mistyped tensors
    │   ├── IncompleteStreamError     the stream ended early: names, bytes or chunks are missing
    │   └── DigestError               bytes arrived changed
    ├── TransportError                the bytes could not be moved
    │   ├── PeerLostError             the peer is dead, stopped or unreachable
    │   ├── PeerAbortedError          the peer failed and said so; carries its traceback
    │   ├── DeadlineError             a wait ran out (also a ``TimeoutError``)
    │   └── ProtocolError             the peer speaks another protocol version or broke the protocol
    └── RefitError                    what the synchronizer raises: one refit failed, and what still serves

Each error may say where it happened (`ErrorContext`). Worker processes hand errors to the driver
as an `ErrorRecord`, plain data that survives any RPC layer.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

_MAX_TRACEBACK_CHARS = 16_000


@dataclass(frozen=True, kw_only=True)
class ErrorContext:
    """Where an error happened. Every field may be unknown (`None`)."""

    side: str | None = None
    """``"policy"``, ``"rollout"`` or ``"driver"``."""
    rank: int | None = None
    peer: str | None = None
    phase: str | None = None
    tensor: str | None = None
    bucket: int | None = None
    bytes_done: int | None = None

    def merged(self, other: ErrorContext) -> ErrorContext:
        """Return a copy with the unknown fields filled in from ``other``."""
        unknown = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unknown)

    def __str__(self) -> str:
        who = f"{self.side or 'worker'} rank {self.rank}" if self.rank is not None else self.side
        parts = [
            who,
            f"phase {self.phase}" if self.phase else None,
            f"peer {self.peer}" if self.peer else None,
            f"tensor {self.tensor!r}" if self.tensor else None,
            f"bucket {self.bucket}" if self.bucket is not None else None,
            f"{self.bytes_done} bytes so far" if self.bytes_done is not None else None,
        ]
        return ", ".join(part for part in parts if part)


class WeightSyncError(RuntimeError):
    """Base of everything weightsync raises on purpose.

    Args:
        message: what went wrong, and what to do about it where that is known.
        context: keyword fields of `ErrorContext`: side, rank, peer, phase, tensor, bucket, bytes_done.
    """

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context = ErrorContext(**context)

    def with_context(self, **context: Any) -> Self:
        """Fill in context fields that are still unknown; returns ``self`` so that it can be raised."""
        self.context = self.context.merged(ErrorContext(**context))
        return self

    def __str__(self) -> str:
        where = str(self.context)
        return f"{self.message} [{where}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # RuntimeError would rebuild from `args` alone and lose the context on its way through an RPC layer.
        return _rebuild_error, (type(self), self.message, asdict(self.context), self.__dict__)


def _rebuild_error(
    cls: type[WeightSyncError], message: str, context: dict[str, Any], state: dict[str, Any]
) -> WeightSyncError:
    error = cls.__new__(cls)
    WeightSyncError.__init__(error, message, **context)
    error.__dict__.update(state)
    return error


class ConfigurationError(WeightSyncError, ValueError):
    """A setting, a name or an argument is wrong. Raised before anything is started."""


class MissingDependencyError(ConfigurationError, ImportError):
    """An optional package is not installed. The message names the extra to install."""


class LifecycleError(WeightSyncError):
    """A call out of order."""


class WorkerFencedError(LifecycleError):
    """A rollout worker holds partly written weights and refuses to serve until a complete refit."""


class StreamError(WeightSyncError):
    """The stream is not what was promised, or not what the model takes."""


class ManifestError(StreamError):
    """Names, shapes or dtypes do not fit: unknown, missing, repeated, misshapen or mistyped tensors."""


class IncompleteStreamError(StreamError):
    """The stream ended before everything that was promised had come."""


class DigestError(StreamError):
    """Bytes arrived changed."""


class TransportError(WeightSyncError):
    """The bytes could not be moved."""


class PeerLostError(TransportError):
    """The peer is dead, stopped or unreachable."""


class PeerAbortedError(TransportError):
    """The peer failed and said so. ``remote`` is its error, traceback included."""

    def __init__(self, message: str, *, remote: ErrorRecord | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.remote = remote


class DeadlineError(TransportError, TimeoutError):
    """A wait ran out of time."""


class ProtocolError(TransportError):
    """The peer speaks another protocol version, or broke the protocol."""


class RefitError(WeightSyncError):
    """One refit failed. The text says which rank, phase and tensor, and what still serves.

    ``failures`` holds one `ErrorRecord` for each rank that failed, the cause first; ``serving`` says,
    rollout rank by rollout rank, which version it serves (`None` for a fenced or lost one).
    """

    def __init__(
        self,
        message: str,
        *,
        failures: tuple[ErrorRecord, ...] = (),
        serving: dict[int, int | None] | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message, **context)
        self.failures = failures
        self.serving = serving or {}


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An error as plain data: what a worker hands to its peer and to the driver."""

    kind: str
    """Class name of the exception."""
    message: str
    traceback: str = ""
    context: ErrorContext = ErrorContext()

    @classmethod
    def from_exception(cls, error: BaseException, **context: Any) -> ErrorRecord:
        """Describe ``error``; context fields given here fill in what the error itself does not know."""
        known = error.context if isinstance(error, WeightSyncError) else ErrorContext()
        message = error.message if isinstance(error, WeightSyncError) else str(error)
        text = "".join(traceback.format_exception(error))
        return cls(
            kind=type(error).__name__,
            message=message or repr(error),
            traceback=text[-_MAX_TRACEBACK_CHARS:],
            context=known.merged(ErrorContext(**context)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return strings, integers and one nested dict: what msgpack, JSON and every RPC layer carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ErrorRecord:
        """Rebuild a record from `to_dict`."""
        return cls(
            kind=data["kind"],
            message=data["message"],
            traceback=data["traceback"],
            context=ErrorContext(**data["context"]),
        )

    @property
    def is_secondhand(self) -> bool:
        """Whether this rank only reports that another one failed: never the cause to show first."""
        return self.kind in {PeerAbortedError.__name__}

    def to_exception(self) -> WeightSyncError:
        """Return a typed exception again (unknown kinds become `WeightSyncError`), with this context."""
        cls = _KINDS.get(self.kind)
        message = self.message if cls else f"{self.kind}: {self.message}"
        error = (cls or WeightSyncError)(message, **asdict(self.context))
        if self.traceback:
            error.add_note(f"remote traceback:\n{self.traceback}")
        return error

    def __str__(self) -> str:
        where = str(self.context)
        return f"{self.kind}: {self.message}" + (f" [{where}]" if where else "")


_KINDS: dict[str, type[WeightSyncError]] = {
    cls.__name__: cls
    for cls in (
        WeightSyncError, ConfigurationError, MissingDependencyError, LifecycleError, WorkerFencedError,
        StreamError, ManifestError, IncompleteStreamError, DigestError, TransportError, PeerLostError,
        PeerAbortedError, DeadlineError, ProtocolError, RefitError,
    )
}  # fmt: skip
