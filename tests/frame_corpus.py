"""Frames to throw at the control channel: valid ones of every message type, and seeded mutations of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from weightsync.control import (
    PROTOCOL_VERSION,
    Abort,
    Bucket,
    Bye,
    ChunkEntry,
    Complete,
    Digests,
    Done,
    Exposed,
    Gate,
    Go,
    Heartbeat,
    Hello,
    Loaded,
    Manifest,
    Packed,
    Ready,
    Release,
    Taken,
    Welcome,
)
from weightsync.control.frames import Header, encode_header, encode_message
from weightsync.errors import ManifestError
from weightsync.tensors import TensorSpec

NONCE = bytes(range(16))
SPECS = tuple(TensorSpec(f"layers.{i}.weight", (4, 128 + i), "bfloat16") for i in range(4))
CHUNKS = tuple(ChunkEntry(spec, 0, spec.nbytes, 2048 * i, 77 + i, i) for i, spec in enumerate(SPECS))

MESSAGES = [
    Hello(PROTOCOL_VERSION, "ab" * 16, 1, NONCE, "rollout 0", 7),
    Welcome(PROTOCOL_VERSION, 1, 7, NONCE, NONCE),
    Ready(NONCE),
    Manifest(SPECS, "xxh3-64"),
    Bucket(0, 1, 8192, CHUNKS),
    Bucket(1, 0, 5, CHUNKS[:1], b"12345"),
    Release(3),
    Exposed("ab" * 16, "xxh3-64", bytes(8 * 5), b"keys"),
    Packed(2, 1, 8192, 40, bytes(8 * 3), bytes(8 * 3)),
    Digests(512, bytes(8 * 7)),
    Loaded(3),
    Taken(),
    Done(3, 4, 2**40, "0" * 32),
    Complete(),
    Gate(3, True),
    Go(3),
    Abort.of(ManifestError("no such tensor", tensor="w", rank=1)),
    Heartbeat("bucket 3"),
    Bye("ended the refit", True),
]

Parts = list[bytes]
_WRONG = [None, True, -1, 2**63, 2**64 - 1, 1.5, "x" * 300, b"\xff" * 40, [], [[]] * 40, {}, {"type": "Bye"}]


def frames_of(session: str, token: bytes, *, epoch: int | None = 1, number: int = 1) -> list[Parts]:
    """One valid frame of each message type."""
    header = encode_header(Header(PROTOCOL_VERSION, session, epoch, token, number))
    return [[header, *encode_message(message)] for message in MESSAGES]


def mutated(frames: list[Parts], count: int, seed: int = 0) -> Iterator[Parts]:
    """Yield ``count`` frames, each a mutation or a mixture of the given ones."""
    rng = random.Random(seed)
    mutations = [_flip_bits, _overwrite, _truncate, _insert, _shuffle, _mix, _confuse, _confuse]
    for _ in range(count):
        parts = list(rng.choice(frames))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            parts = rng.choice(mutations)(parts, frames, rng)
        yield parts


def bombs(frames: list[Parts]) -> Iterator[Parts]:
    """Yield frames of a few bytes that claim to be of very many."""
    header = frames[0][0]
    lengths = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    lengths += [b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff"]
    for claim in lengths:
        yield [header, claim]
        yield [claim, frames[0][1]]
        for name, field in (
            ("Manifest", "tensors"),
            ("Bucket", "chunks"),
            ("Abort", "error"),
            ("Bye", "reason"),
            ("Exposed", "addresses"),
            ("Packed", "offsets"),
            ("Digests", "digests"),
        ):
            yield [
                header,
                b"\x82\xa4type" + msgspec.msgpack.encode(name) + msgspec.msgpack.encode(field) + claim,
            ]
        shape = b"\x82\xa4type\xa8Manifest\xa7tensors\x91\x93\xa1w" + claim
        yield [header, shape]


def _index(parts: Parts, rng: random.Random) -> int:
    return rng.randrange(len(parts)) if parts else 0


def _flip_bits(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    return _on_bytes(parts, rng, lambda byte: byte ^ (1 << rng.randrange(8)))


def _overwrite(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    return _on_bytes(parts, rng, lambda _: rng.choice([0, 0x7F, 0x80, 0xC0, 0xC1, 0xDC, 0xDD, 0xDF, 0xFF]))


def _on_bytes(parts: Parts, rng: random.Random, change) -> Parts:
    index = _index(parts, rng)
    if not parts or not parts[index]:
        return parts
    part = bytearray(parts[index])
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(part))
        part[at] = change(part[at])
    return [*parts[:index], bytes(part), *parts[index + 1 :]]


def _truncate(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    if not parts:
        return parts
    index = _index(parts, rng)
    return [*parts[:index], parts[index][: rng.randrange(len(parts[index]) + 1)], *parts[index + 1 :]]


def _insert(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    index = _index(parts, rng)
    return [*parts[:index], rng.randbytes(rng.randrange(64)), *parts[index:]]


def _shuffle(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    return rng.choice(
        [parts[::-1], parts * 2, parts[:1], parts[1:], [parts[0]] * 2 if parts else [], parts * 20]
    )


def _mix(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    return [*parts[:1], *rng.choice(frames)[1:]]


def _confuse(parts: Parts, frames: list[Parts], rng: random.Random) -> Parts:
    """Put a value of another type, or another field, somewhere into a message that else stays well formed."""
    index = _index(parts, rng)
    try:
        tree = msgspec.msgpack.decode(parts[index])
    except (IndexError, msgspec.DecodeError, RecursionError, ValueError):
        return parts
    changed = msgspec.msgpack.encode(_changed(tree, rng))
    return [*parts[:index], changed, *parts[index + 1 :]]


def _changed(tree, rng: random.Random):
    if rng.random() < 0.3 or not tree or not isinstance(tree, (dict, list)):
        return rng.choice(_WRONG)
    if isinstance(tree, list):
        at = rng.randrange(len(tree))
        new = rng.choice([[_changed(tree[at], rng)], [], [tree[at], tree[at]]])
        return [*tree[:at], *new, *tree[at + 1 :]]
    key = rng.choice(sorted(tree, key=repr))
    rest = {name: value for name, value in tree.items() if name != key}
    return rng.choice([{**tree, key: _changed(tree[key], rng)}, rest, {**tree, "more": 1}])
