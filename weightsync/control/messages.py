"""What workers say to each other on the control channel: the message types. No I/O.

Types and bounds are checked while a message is decoded, each count before anything is allocated for it;
`frames` puts messages into bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from weightsync.errors import ErrorRecord
from weightsync.tensors import TensorSpec

PROTOCOL_VERSION = 3
"""Raised whenever a header or a message changes; peers of different versions refuse each other."""

NONCE_BYTES = 16
MAX_ENTRIES = 1 << 20
"""Tensors of a manifest, or chunks of a bucket: few bytes make a long list of them."""
MAX_WORDS_CHARS = 65_536
_MAX_EXTENT = 2**63 - 1
_LARGEST_ITEM = 16

Count = Annotated[int, msgspec.Meta(ge=0)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS_CHARS)]


def encodable_text(text: str) -> str:
    """Replace what UTF-8 cannot carry (lone surrogates), so that texts about errors always leave."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every message."""

    def describe(self) -> str:
        """Return a few words for error texts: ``bucket 3``."""
        return type(self).__name__.lower()


class Hello(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to server: let us begin. ``session`` is the server's; ``epoch`` `None` takes the server's."""

    protocol: int
    session: Words
    epoch: Count | None
    nonce: Nonce
    name: Words
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

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    digest_kind: Words

    def __post_init__(self) -> None:
        for spec in self.tensors:
            _require_shape(spec)

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"manifest of {len(self.tensors)} tensors"


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk in a bucket: its tensor, its bytes within the tensor, its place in the bucket.

    ``chunk_offset``, ``chunk_size`` and ``offset`` are bytes; ``digest`` is 64 bits of the chunk's bytes.
    ``ordinal`` counts the tensors of the whole stream, of which this sender may have a share only.
    """

    spec: TensorSpec
    chunk_offset: Count
    chunk_size: Count
    offset: Count
    digest: Count
    ordinal: Count

    def __post_init__(self) -> None:
        _require_shape(self.spec)


class Bucket(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """A bucket is filled: number ``seq`` of the refit, in buffer ``slot``, ``nbytes`` long.

    ``payload`` holds the bytes where the transport has no other way to move them.
    """

    seq: Count
    slot: Count
    nbytes: Count
    chunks: Annotated[tuple[ChunkEntry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    payload: bytes = b""

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"bucket {self.seq}"


class Release(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver is done with the bytes of bucket ``seq``; its buffer may be filled again."""

    seq: Count

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"release of bucket {self.seq}"


class Exposed(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Policy rank to rollout rank: what moves by regions may be read now, until `Taken`.

    ``manifest`` is the digest of the stream's. ``addresses`` has an int64 for each storage of the sender's
    table; of one that has none, 0, all comes in `Packed`. ``keys`` is what the transport needs to reach them.
    """

    manifest: Words
    digest_kind: Words
    addresses: bytes
    keys: bytes = b""


class Packed(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Buffer ``slot`` holds rows ``first`` and following of those that are packed for the receiver.

    ``offsets`` has an int64 for each row, its place in the buffer; ``digests`` a uint64, 0 where it does not
    count.
    """

    seq: Count
    slot: Count
    nbytes: Count
    first: Count
    offsets: bytes
    digests: bytes

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"packed bucket {self.seq}"


class Digests(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Digests, a uint64 each, of row ``first`` and following of those that the receiver reads in place."""

    first: Count
    digests: bytes


class Loaded(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver has loaded its batch ``number`` of what moves by regions, wherever it came from."""

    number: Count

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"batch {self.number} loaded"


class Taken(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver has read, checked and loaded all that moves by regions."""


class Done(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender has sent everything: these many buckets, tensors and bytes, of that manifest."""

    buckets: Count
    tensors: Count
    nbytes: Count
    manifest_digest: Words


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
    """The sender of this failed, with this error."""

    error: ErrorRecord

    @classmethod
    def of(cls, error: BaseException) -> Abort:
        """Describe an exception, its traceback included."""
        data = _encodable(ErrorRecord.from_exception(error).to_dict())
        return cls(ErrorRecord.from_dict({**data, "message": data["message"][:MAX_WORDS_CHARS]}))

    @property
    def record(self) -> ErrorRecord:
        """The error."""
        return self.error


class Heartbeat(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender of this lives; ``progress`` says what it did last."""

    progress: Words

    def describe(self) -> str:  # noqa: D102 - inherited
        return f"heartbeat ({self.progress})" if self.progress else "heartbeat"


class Bye(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sender of this leaves the refit in good order; with ``final`` its end of the link is closed."""

    reason: Words = ""
    final: bool = False


AnyMessage = (
    Hello
    | Welcome
    | Ready
    | Manifest
    | Bucket
    | Release
    | Exposed
    | Packed
    | Digests
    | Loaded
    | Taken
    | Done
    | Complete
    | Gate
    | Go
    | Abort
    | Heartbeat
    | Bye
)


def _require_shape(spec: TensorSpec) -> None:
    extent = _LARGEST_ITEM
    for size in spec.shape:
        if size < 0:
            raise ValueError(f"negative size in shape {spec.shape}")
        extent *= max(size, 1)
    if extent > _MAX_EXTENT:
        raise ValueError(f"no memory has room for the shape {spec.shape}")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable_text(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return value
