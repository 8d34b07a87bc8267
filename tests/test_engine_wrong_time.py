"""A peer that says the wrong thing, or at the wrong time: a typed error, and the next refit works."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests import engine_crew
from tests.control_support import background
from tests.engine_crew import MIB, Crew, assert_same, collect, plain, some_weights
from weightsync.control import Bucket, ChunkEntry, Complete, Done, Gate, Go, Manifest, Release
from weightsync.engines.ipc import IPCCheckpointEngine
from weightsync.errors import (
    DigestError,
    IncompleteStreamError,
    ManifestError,
    PeerAbortedError,
    ProtocolError,
)
from weightsync.tensors import TensorSpec, WeightManifest

pytestmark = pytest.mark.timeout(60)

BYTES = 4096
SPECS = tuple(TensorSpec(f"w{i}", (BYTES,), "uint8") for i in range(3))


class IpcCrew(Crew):
    """Engines whose buckets are read where they are, so that one that nobody has packed can be fetched."""

    def __init__(self, *worlds, verify="off", **settings) -> None:
        settings = {**engine_crew.FAST, "verify": verify, **settings}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_crew, "make_engine", lambda size: IPCCheckpointEngine(size, **settings))
            super().__init__(*worlds)


def entry(number=0, *, spec=None, ordinal=None, start=0, size=BYTES, at=0, digest=0):
    spec = spec or SPECS[number]
    return ChunkEntry(spec, start, size, at, digest, number if ordinal is None else ordinal)


def bucket(seq=0, *entries, slot=0, nbytes=MIB, payload=b""):
    return Bucket(seq, slot, nbytes, tuple(entries), payload)


def done(*specs, buckets=1):
    manifest = WeightManifest(tuple(specs))
    return Done(buckets, len(specs), manifest.nbytes, manifest.digest())


PROMISE = Manifest(SPECS, "off")
HUGE = TensorSpec("huge", (2**50,), "uint8")

SENT_WRONGLY = {
    "a bucket out of turn": ([bucket(1)], ProtocolError, "expected bucket 0, got bucket 1"),
    "a bucket twice": ([bucket(0), bucket(0)], ProtocolError, "expected bucket 1, got bucket 0"),
    "a buffer that is not there": ([bucket(slot=99)], ProtocolError, "did not tell where it is"),
    "a buffer told of in noise": ([bucket(slot=2, payload=b"\xc1")], ProtocolError, "did not tell where"),
    "more than a buffer holds": ([bucket(nbytes=2**60)], ProtocolError, "the buffers here"),
    "a chunk of 2**60 bytes": (
        [bucket(0, entry(spec=TensorSpec("w", (2**58,), "uint8"), size=2**60))],
        ManifestError,
        "lies outside a bucket",
    ),
    "a chunk past the end": ([bucket(0, entry(at=MIB - 8))], ManifestError, "lies outside a bucket"),
    "a chunk past its tensor": ([bucket(0, entry(start=8))], IncompleteStreamError, "its description"),
    "a tensor from the middle": (
        [bucket(0, entry(start=8, size=BYTES - 8))],
        IncompleteStreamError,
        "expected a tensor's first byte, got byte 8",
    ),
    "a chunk larger than its tensor": (
        [bucket(0, entry(size=BYTES + 8))],
        IncompleteStreamError,
        "does not match its description",
    ),
    "a tensor larger than the memory": (
        [bucket(0, entry(spec=HUGE, size=MIB))],
        ManifestError,
        "does not fit the .* bytes of memory here",
    ),
    "an unknown dtype": (
        [bucket(0, entry(spec=TensorSpec("w", (BYTES,), "float3")))],
        ManifestError,
        "unknown dtype",
    ),
    "a promise twice": ([PROMISE, PROMISE], ProtocolError, "in the middle of its stream"),
    "a promise after a bucket": ([bucket(0, entry(0)), PROMISE], ProtocolError, "in the middle"),
    "a promise of one name twice": ([Manifest(SPECS[:1] * 2, "off")], ManifestError, "repeated"),
    "another kind of digests": ([Manifest(SPECS, "fold-64")], ProtocolError, "digests with 'fold-64'"),
    "another tensor than promised": ([PROMISE, bucket(0, entry(1, ordinal=0))], ManifestError, "'w0'"),
    "more than promised": ([PROMISE, bucket(0, entry(0, ordinal=3))], ManifestError, "promised no more"),
    "less than promised": ([PROMISE, bucket(0, entry(0)), done(*SPECS)], IncompleteStreamError, "'w1'"),
    "a place left empty": (
        [bucket(0, entry(0), entry(2, at=BYTES)), done(SPECS[0], SPECS[2])],
        IncompleteStreamError,
        "tensor number 1 of the stream never came",
    ),
    "a name twice": (
        [bucket(0, entry(0), entry(0, ordinal=1, at=BYTES))],
        ManifestError,
        "a tensor came twice",
    ),
    "an end in a tensor": (
        [bucket(0, entry(0, size=BYTES // 2)), done(SPECS[0])],
        IncompleteStreamError,
        "ended at byte 2048 of 4096",
    ),
    "more buckets than came": (
        [bucket(0, entry(0)), done(SPECS[0], buckets=2)],
        IncompleteStreamError,
        "its share in 2 buckets, .* 1 buckets came",
    ),
    "a receiver's words": ([Release(0)], ProtocolError, "expected Manifest or Bucket or Done"),
    "a policy rank's words": ([Go(0)], ProtocolError, "expected Manifest or Bucket or Done"),
    "an end before all else": ([PROMISE, done(*SPECS, buckets=0)], IncompleteStreamError, "never came: 'w0'"),
}


@pytest.fixture(scope="module")
def pair():
    with IpcCrew() as crew:
        yield crew


def refits_well(crew, seed):
    weights = some_weights(seed=seed, count=3)
    for received in crew.refit(weights):
        assert sorted(name for name, _ in received) == [name for name, _ in weights]
        assert_same(sorted(received), weights)


@pytest.mark.parametrize("case", SENT_WRONGLY)
def test_what_a_sender_says_wrongly_is_refused_by_the_receiver(pair, case):
    said, kind, text = SENT_WRONGLY[case]
    receiving = background(asyncio.run, collect(pair.rollout[0]))
    (link,) = pair.policy[0]._session.targets.values()
    link.begin(epoch=None)
    before = psutil.Process().memory_info().rss
    for message in said:
        link.send(message)
    with pytest.raises(PeerAbortedError) as told:
        link.receive(Complete, Release, phase="load", timeout_s=5) and link.receive(Complete, phase="load")
    link.end()
    with pytest.raises(kind, match=text) as caught:
        receiving.result(5)
    assert type(caught.value) is kind
    assert caught.value.context.peer == "policy rank 0"
    assert told.value.remote.kind == kind.__name__
    assert told.value.remote.traceback
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    refits_well(pair, seed=1)


def test_bytes_that_are_not_those_of_the_digest_are_refused():
    with IpcCrew(verify="full") as crew:
        receiving = background(asyncio.run, collect(crew.rollout[0]))
        (link,) = crew.policy[0]._session.targets.values()
        link.begin(epoch=None)
        link.send(bucket(0, entry(0, digest=1)))
        with pytest.raises(DigestError, match="bytes 0 to 4096 arrived changed"):
            receiving.result(5)
        link.end()
        refits_well(crew, seed=2)


def take(link, count):
    for _ in range(count):
        link.receive(Bucket, phase="load")


ANSWERED_WRONGLY = {
    "loaded before anything came": (0, [Complete()], "has loaded everything, and cannot have"),
    "loaded before the end was told": (2, [Release(0), Complete()], "has loaded everything, and cannot have"),
    "loaded and released nothing": (1, [Complete()], "has loaded everything, and cannot have"),
    "a bucket that was never given": (1, [Release(7)], "released bucket 7, which it was never given"),
    "a bucket twice": (1, [Release(0), Release(0)], "released bucket 0, which it was never given"),
    "a sender's words": (
        1,
        [Done(0, 0, 0, "")],
        "expected Release or Complete from rollout rank 0, got Done",
    ),
    "a policy rank's words": (1, [Gate(0, False)], "expected Release or Complete .*, got Gate"),
}


@pytest.mark.parametrize("case", ANSWERED_WRONGLY)
def test_what_a_receiver_answers_wrongly_is_refused_by_the_sender(pair, case):
    count, said, text = ANSWERED_WRONGLY[case]
    sending = background(asyncio.run, pair.policy[0].send_weights(plain(some_weights())))
    (link,) = pair.rollout[0]._session.sources.values()
    link.begin(epoch=None)
    take(link, count)
    for message in said:
        link.send(message)
    with pytest.raises(ProtocolError, match=text) as caught:
        sending.result(5)
    assert type(caught.value) is ProtocolError
    assert caught.value.context.peer == "rollout rank 0"
    assert caught.value.context.bytes_done is not None
    with pytest.raises(PeerAbortedError, match=text):
        while True:
            link.receive(phase="load")
    link.end()
    refits_well(pair, seed=3)


DISAGREEING = {
    "other promises": (
        [Manifest(SPECS, "off")],
        [Manifest(SPECS[:2], "off")],
        ManifestError,
        "promises other weights than the others",
    ),
    "another tensor in the same place": (
        [bucket(0, entry(0))],
        [bucket(0, entry(1, ordinal=0))],
        ManifestError,
        "it came as 'w.' .* and now as 'w.'",
    ),
    "the same bytes twice": (
        [bucket(0, entry(0, size=BYTES // 2))],
        [bucket(0, entry(0, size=BYTES // 2))],
        IncompleteStreamError,
        "bytes 0 to 2048 came twice",
    ),
    "one tensor in two places": (
        [bucket(0, entry(0))],
        [bucket(0, entry(0, ordinal=1))],
        ManifestError,
        "a tensor came twice",
    ),
    "other ends": (
        [bucket(0, entry(0)), done(*SPECS[:2])],
        [bucket(0, entry(1)), done(SPECS[0])],
        IncompleteStreamError,
        "the stream that policy rank 1 has sent",
    ),
}


@pytest.fixture(scope="module")
def stripes():
    with IpcCrew(2, 1, topology="stripes") as crew:
        yield crew


@pytest.mark.parametrize("case", DISAGREEING)
def test_two_senders_that_disagree_are_found_out(stripes, case):
    *said, kind, text = DISAGREEING[case]
    receiving = background(asyncio.run, collect(stripes.rollout[0]))
    links = [next(iter(engine._session.targets.values())) for engine in stripes.policy]
    for link in links:
        link.begin(epoch=None)
    for link, messages in zip(links, said, strict=True):
        for message in messages:
            link.send(message)
    with pytest.raises(kind, match=text):
        receiving.result(5)
    for link in links:
        with pytest.raises(PeerAbortedError, match=text):
            while True:
                link.receive(phase="load", timeout_s=5)
        link.end()
    refits_well(stripes, seed=4)


@pytest.mark.nixl
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x92\x94\x01\xce\x7f\xff\xff\xff\x00\xa4DRAM\xc4\x01x"])
def test_a_buffer_that_nixl_was_not_told_of_is_refused(payload):
    with Crew() as crew:
        receiving = background(asyncio.run, collect(crew.rollout[0]))
        (link,) = crew.policy[0]._session.targets.values()
        link.begin(epoch=None)
        link.send(bucket(slot=9, payload=payload))
        with pytest.raises(Exception, match=r"buffer|metadata") as caught:
            receiving.result(5)
        assert type(caught.value).__name__ in {"ProtocolError", "TransportError"}
        link.end()
        refits_well(crew, seed=6)
