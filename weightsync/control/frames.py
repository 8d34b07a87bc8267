"""Frames of the control channel: messages as bytes and back. No I/O.

A frame is two or three message parts: a header, a message, and (for a bucket that carries its bytes) the
payload. The first two are msgpack, checked against their types while they are decoded. The header begins
with the protocol version in every version of the protocol, so that peers of different versions can at
least say so. A declared length allocates nothing: the decoder holds it against the bytes that are there, and
against the limits that `messages` sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from weightsync.control.messages import (
    MAX_ENTRIES,
    PROTOCOL_VERSION,
    AnyMessage,
    Bucket,
    Count,
    Manifest,
    Message,
    Words,
)
from weightsync.errors import ConfigurationError

MAX_HEADER_BYTES = 4096


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every frame says first. ``token`` is empty before the handshake is done.

    ``number`` counts the frames of one side in one refit, from 1: what does not increase is a replay.
    """

    protocol: int
    session: Words
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
    nbytes: int = 0
    """Bytes of all parts."""


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
        ConfigurationError: a field cannot be encoded: a wrong type, text that is not valid unicode, or more
            entries than a peer takes.
    """
    _require_countable(message)
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
    if len(parts[0]) > MAX_HEADER_BYTES:
        raise MalformedFrameError(f"a header of {len(parts[0])} bytes")
    nbytes = sum(map(len, parts))
    spoken = _prefix_decoder.decode(parts[0]).protocol
    if spoken != protocol:
        return Frame(spoken, None, None, nbytes)
    header, message = _header_decoder.decode(parts[0]), _message_decoder.decode(parts[1])
    if len(parts) == 3:
        message = _with_payload(message, parts[2])
    return Frame(spoken, header, message, nbytes)


def _with_payload(message: Message, payload: bytes) -> Message:
    if not isinstance(message, Bucket) or message.payload:
        raise MalformedFrameError("a payload belongs to a bucket")
    return msgspec.structs.replace(message, payload=payload)


def _require_countable(message: Message) -> None:
    entries = len(message.tensors) if isinstance(message, Manifest) else 0
    entries = len(message.chunks) if isinstance(message, Bucket) else entries
    if entries > MAX_ENTRIES:
        raise ConfigurationError(
            f"a {type(message).__name__} message has {entries} entries, a peer takes {MAX_ENTRIES}: "
            "send fewer tensors in one refit, or use smaller buckets"
        )
