"""What transports say to each other: in the metadata, and in the payload of a bucket's message. No I/O."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weightsync.control import Bucket
from weightsync.engines.transport import Peer
from weightsync.errors import ConfigurationError, ProtocolError

T = TypeVar("T")


def describe(description: msgspec.Struct) -> dict[str, Any]:
    """Return a description as `BucketTransport.describe` does: plain data, bytes as they are."""
    return dict(msgspec.to_builtins(description, builtin_types=(bytes,)))


def read_description(peer: Peer, kind: type[T]) -> T:
    """Read what a peer's `describe` was given.

    Raises:
        ConfigurationError: it is something else.
    """
    try:
        return msgspec.convert(peer.transport, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the transport of {peer.who} is misdescribed: {error}") from error


def require_alike(peer: Peer, setting: str, theirs: object, ours: object) -> None:
    """Check a setting that all workers need alike.

    Raises:
        ConfigurationError: the peer has another.
    """
    if theirs != ours:
        raise ConfigurationError(
            f"{peer.who} has {setting} {theirs!r:.80}, this worker {ours!r}: set {setting} alike on all "
            f"workers"
        )


def write_payload(place: object) -> bytes:
    """Return what `BucketTransport.publish` says of where a buffer is."""
    return msgspec.msgpack.encode(place)


def read_payload(bucket: Bucket, kind: Any) -> Any:
    """Read where a bucket's buffer is; ``kind`` is the type that `write_payload` was given.

    Raises:
        ProtocolError: the sender did not say.
    """
    try:
        return msgspec.msgpack.decode(bucket.payload, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the sender named buffer {bucket.slot} and did not tell where it is: {error}", bucket=bucket.seq
        ) from error


def require_fits(bucket: Bucket, nbytes: int) -> None:
    """Check that a bucket is within the sender's buffer, which has ``nbytes`` bytes.

    Raises:
        ProtocolError: it is not.
    """
    if bucket.nbytes > nbytes:
        raise ProtocolError(
            f"bucket {bucket.seq} has {bucket.nbytes} bytes, and is larger than the sender's buffer",
            bucket=bucket.seq,
        )
