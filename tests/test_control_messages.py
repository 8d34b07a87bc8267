"""Messages and frames of the control channel: round trips, and bytes that are no frame."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.control import (
    PROTOCOL_VERSION,
    Abort,
    Bucket,
    Bye,
    ChunkEntry,
    Complete,
    Done,
    Gate,
    Go,
    Heartbeat,
    Hello,
    Manifest,
    Ready,
    Release,
    Welcome,
)
from weightsync.control.frames import (
    Header,
    MalformedFrameError,
    decode_frame,
    encode_header,
    encode_message,
)
from weightsync.errors import ConfigurationError, ManifestError
from weightsync.tensors import TensorSpec

NONCE = bytes(range(16))
HEADER = Header(PROTOCOL_VERSION, "ab" * 16, 3, NONCE, 1)
NAMES = ["model.embed", "モデル.重み", "a\0b", "line\nbreak", "\U0001f600", "'\"\\", "", "x" * 4096]


def entry(name="w", shape=(2, 3)):
    return ChunkEntry(TensorSpec(name, shape, "bfloat16"), 0, 12, 256, 2**64 - 1, 7)


EVERY = [
    Hello(PROTOCOL_VERSION, "ab" * 16, None, NONCE, "rollout 0"),
    Hello(PROTOCOL_VERSION, "ab" * 16, 4, NONCE, "rollout 0", 7),
    Welcome(PROTOCOL_VERSION, 4, None, NONCE, NONCE),
    Ready(NONCE),
    Manifest(tuple(TensorSpec(name, (0, 4), "float8_e4m3fn") for name in NAMES), "xxh3-64"),
    Manifest((), "xxh3-64"),
    Bucket(0, 1, 268, tuple(entry(name) for name in NAMES)),
    Bucket(2**40, 0, 3, (), b"\0\xff\x01"),
    Release(5),
    Done(3, 10, 2**50, "0" * 32),
    Complete(),
    Gate(3, True),
    Go(3),
    Abort.of(ManifestError("no such tensor", tensor="a\0b", rank=1)),
    Heartbeat("bucket 3"),
    Bye(),
]


def frame(message):
    return [encode_header(HEADER), *encode_message(message)]


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_equal(message):
    decoded = decode_frame(frame(message))
    assert (decoded.header, decoded.message) == (HEADER, message)


def test_a_payload_travels_beside_the_message():
    parts = frame(Bucket(1, 0, 4, (), b"abcd"))
    assert len(parts) == 3
    assert parts[2] == b"abcd"


def test_an_abort_carries_the_error_and_its_traceback():
    try:
        raise ManifestError("no such tensor", tensor="lm_head", bucket=3)
    except ManifestError as error:
        message = Abort.of(error)
    record = decode_frame(frame(message)).message.record
    assert (record.kind, record.message, record.context.tensor, record.context.bucket) == (
        "ManifestError", "no such tensor", "lm_head", 3,
    )  # fmt: skip
    assert "test_an_abort_carries_the_error_and_its_traceback" in record.traceback


def test_an_abort_leaves_even_with_text_that_utf8_cannot_carry():
    record = decode_frame(frame(Abort.of(ValueError("bad \udcff name")))).message.record
    assert record.message == "bad \\udcff name"


@pytest.mark.parametrize("message", [Bye("\udcff"), Release(-1.5j), Done(2**80, 0, 0, "")])
def test_what_cannot_be_encoded_is_an_error_of_the_caller(message):
    with pytest.raises(ConfigurationError, match="cannot be encoded"):
        encode_message(message)


def test_another_protocol_version_is_told_apart_whatever_follows():
    other = PROTOCOL_VERSION + 1
    parts = [msgspec.msgpack.encode([other, {"quite": "different"}]), b"\xc1"]
    decoded = decode_frame(parts)
    assert (decoded.protocol, decoded.header, decoded.message) == (other, None, None)


def packed(value):
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [encode_header(HEADER)],
        [encode_header(HEADER), b""],
        [encode_header(HEADER), packed({})],
        [encode_header(HEADER), packed({"type": "Nothing"})],
        [encode_header(HEADER), packed({"type": "Release"})],
        [encode_header(HEADER), packed({"type": "Release", "seq": -1})],
        [encode_header(HEADER), packed({"type": "Release", "seq": "1"})],
        [encode_header(HEADER), packed({"type": "Release", "seq": 1, "more": 1})],
        [encode_header(HEADER), packed({"type": "Ready", "echo": b"short"})],
        [
            encode_header(HEADER),
            packed({"type": "Manifest", "tensors": [["w", [-1], "int8"]], "digest_kind": ""}),
        ],
        [encode_header(HEADER), packed({"type": "Abort", "error": {"kind": 3}})],
        [encode_header(HEADER), packed({"type": "Bye"}), b"payload"],
        [encode_header(HEADER), packed({"type": "Bye"}), b"", b""],
        [packed({"protocol": 1}), packed({"type": "Bye"})],
        [packed([PROTOCOL_VERSION]), packed({"type": "Bye"})],
        [packed([PROTOCOL_VERSION, "ab", 1, b"", -1]), packed({"type": "Bye"})],
        [packed(["1", "ab", 1, b"", 1]), packed({"type": "Bye"})],
        [b"\x91" * 5000, packed({"type": "Bye"})],
    ],
)
def test_bytes_that_are_no_frame(parts):
    with pytest.raises(MalformedFrameError):
        decode_frame(parts)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_changed_bytes_are_refused_or_decoded_but_never_anything_else(message, data):
    parts = frame(message)
    index = data.draw(st.integers(0, len(parts) - 1))
    part = bytearray(parts[index])
    for _ in range(data.draw(st.integers(1, 4))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    parts[index] = bytes(part[: data.draw(st.integers(0, len(part)))])
    try:
        decode_frame(parts)
    except MalformedFrameError:
        return


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=5000).filter(lambda s: s.isprintable() or True),
    st.lists(st.integers(0, 100), max_size=8) | st.tuples(st.integers(0, 2**40)),
)
def test_any_name_and_shape_travels(name, shape):
    message = Manifest((TensorSpec(name, tuple(shape), "int8"),), "fold-64")
    assert decode_frame(frame(message)).message == message
