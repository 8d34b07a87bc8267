"""What travels on the control channel: the message types and their frames. No I/O.

A frame is two or three message parts: a header, a message, and (for a bucket that carries its bytes) the
payload. Both of the first two are msgpack, checked against the types below while they are decoded. The
header begins with the protocol version in every version of the protocol, so that peers of different
versions can at least say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from weightsync.errors import ConfigurationError, ErrorRecord
from weightsync.tensors import TensorSpec

PROTOCOL_VERSION = 1
"""Raised whenever a header or a message changes; peers of different versions refuse each other."""

NONCE_BYTES = 16
MAX_PROGRESS_CHARS = 200

Count = Annotated[int, msgspec.Meta(ge=0)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Message(msgspec.Struct, frozen=True, kw_only=False, tag=True, forbid_unknown_fields=True):
    """Base of every message."""

    def describe(self) -> str:
        """Return a few words for error texts: ``bucket 3``."""
        return type(self).__name__.lower()


class Hello(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to server: let us begin. ``session`` is the server's; ``epoch`` `None` takes the server's."""

    protocol: int
    session: str
    epoch: Count | None
    nonce: Nonce
    name: str
    version: int | None = None


class Welcome(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Server to client: the epoch and version it is at; ``echo`` is the client's nonce."""

    protocol: int
    epoch: Count
    version: int | None
    nonce: Nonce
    echo: Nonce


class Ready(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to server: begun; ``echo`` is the server's nonce, the token of the refit from now on."""

    echo: Nonce


class Manifest(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every tensor that will come, in order, and the kind of digest that the chunks carry."""

    tensors: tuple[TensorSpec, ...]
    digest_kind: str

    def __post_init__(self) -> None:
        for spec in self.tensors:
            _require_shape(spec)

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"manifest of {len(self.tensors)} tensors"


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk in a bucket: its tensor, its bytes within the tensor, its place in the bucket.

    ``chunk_offset``, ``chunk_size`` and ``offset`` are bytes; ``digest`` is 64 bits of the chunk's bytes.
    """

    spec: TensorSpec
    chunk_offset: Count
    chunk_size: Count
    offset: Count
    digest: Count

    def __post_init__(self) -> None:
        _require_shape(self.spec)


class Bucket(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """A bucket is filled: number ``seq`` of the refit, in buffer ``slot``, ``nbytes`` long.

    ``payload`` holds the bytes where the transport has no other way to move them.
    """

    seq: Count
    slot: Count
    nbytes: Count
    chunks: tuple[ChunkEntry, ...]
    payload: bytes = b""

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"bucket {self.seq}"


class Release(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver is done with the bytes of bucket ``seq``; its buffer may be filled again."""

    seq: Count

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"release of bucket {self.seq}"


class Done(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender has sent everything: these many buckets, tensors and bytes, of that manifest."""

    buckets: Count
    tensors: Count
    nbytes: Count
    manifest_digest: str


class Complete(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver has received, checked and loaded everything."""


class Gate(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank that drains its stream in step is at ``step``, or has ``finished``."""

    step: Count
    finished: bool


class Go(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every rank has reached ``step``: go on."""

    step: Count


class Abort(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender of this failed; ``error`` is an `ErrorRecord` as a dict."""

    error: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Abort:
        """Describe an exception, its traceback included."""
        return cls(_encodable(ErrorRecord.from_exception(error).to_dict()))

    @property
    def record(self) -> ErrorRecord:
        """The error.

        Raises:
            msgspec.ValidationError: the dict does not describe one.
        """
        return msgspec.convert(self.error, ErrorRecord)


class Heartbeat(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender of this lives; ``progress`` says what it did last."""

    progress: str

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"heartbeat ({self.progress})" if self.progress else "heartbeat"


class Bye(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender of this leaves the refit in good order; with ``final`` its end of the link is closed."""

    reason: str = ""
    final: bool = False


AnyMessage = (
    Hello
    | Welcome
    | Ready
    | Manifest
    | Bucket
    | Release
    | Done
    | Complete
    | Gate
    | Go
    | Abort
    | Heartbeat
    | Bye
)


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every frame says first. ``token`` is empty before the handshake is done.

    ``number`` counts the frames of one side in one refit, from 1: what does not increase is a replay.
    """

    protocol: int
    session: str
    epoch: int | None
    token: bytes
    number: Count


class _Prefix(msgspec.Struct, array_like=True):
    """The part of a header that no version of the protocol may change."""

    protocol: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame. ``header`` and ``message`` are `None` when the peer speaks another protocol."""

    protocol: int
    header: Header | None
    message: Message | None


class MalformedFrameError(ValueError):
    """Bytes that are no frame. Counted and dropped, never shown to the caller."""


_encoder = msgspec.msgpack.Encoder()
_prefix_decoder = msgspec.msgpack.Decoder(_Prefix)
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)


def encode_header(header: Header) -> bytes:
    """Return the first part of a frame."""
    return _encoder.encode(header)


def encode_message(message: Message) -> list[bytes]:
    """Return the parts of a frame that follow the header.

    Raises:
        ConfigurationError: a field cannot be encoded: a wrong type, or text that is not valid unicode.
    """
    payload = b""
    if isinstance(message, Bucket) and message.payload:
        payload = bytes(message.payload)
        message = msgspec.structs.replace(message, payload=b"")
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"a {type(message).__name__} message cannot be encoded: {error}") from error
    return [body, payload] if payload else [body]


def decode_frame(parts: Sequence[bytes], protocol: int = PROTOCOL_VERSION) -> Frame:
    """Check and decode one frame.

    Raises:
        MalformedFrameError: whatever is wrong with the bytes.
    """
    try:
        return _decode(parts, protocol)
    except MalformedFrameError:
        raise
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedFrameError(str(error)) from error


def _decode(parts: Sequence[bytes], protocol: int) -> Frame:
    if len(parts) not in {2, 3}:
        raise MalformedFrameError(f"{len(parts)} parts")
    spoken = _prefix_decoder.decode(parts[0]).protocol
    if spoken != protocol:
        return Frame(spoken, None, None)
    header, message = _header_decoder.decode(parts[0]), _message_decoder.decode(parts[1])
    if len(parts) == 3:
        message = _with_payload(message, parts[2])
    if isinstance(message, Abort):
        _ = message.record
    return Frame(spoken, header, message)


def _with_payload(message: Message, payload: bytes) -> Message:
    if not isinstance(message, Bucket) or message.payload:
        raise MalformedFrameError("a payload belongs to a bucket")
    return msgspec.structs.replace(message, payload=payload)


def _require_shape(spec: TensorSpec) -> None:
    if any(size < 0 for size in spec.shape):
        raise ValueError(f"negative size in shape {spec.shape}")


def _encodable(value: Any) -> Any:
    """Replace what UTF-8 cannot carry (lone surrogates in a message), so that an abort always leaves."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return value
