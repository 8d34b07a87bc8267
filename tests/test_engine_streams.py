"""What goes in at the policy side comes out at the rollout side: every kind of stream, over real NIXL."""

from __future__ import annotations

import time

import pytest
import torch

from tests.engine_crew import (
    MIB,
    Crew,
    assert_same,
    collect,
    make_engine,
    noise,
    plain,
    run,
    some_weights,
    stream_of,
)
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    ManifestError,
    PeerAbortedError,
    TransportError,
    WeightSyncError,
)
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, dtype_from_name

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "complex128",
]  # fmt: skip


@pytest.fixture(scope="module")
def crew():
    with Crew() as crew:
        yield crew


def of_dtype(name: str, count: int, seed: int) -> torch.Tensor:
    dtype = dtype_from_name(name)
    data = noise(count * dtype.itemsize, seed)
    return (data % 2 if dtype == torch.bool else data).view(dtype)


def layouts():
    base = torch.arange(24.0).reshape(2, 3, 4)
    big = torch.arange(1_200_000, dtype=torch.float32).reshape(1200, 1000)
    return [
        ("plain", base),
        ("middle", base[:, 0, :]),
        ("transposed", torch.arange(6000.0).reshape(60, 100).t()),
        ("expanded", torch.arange(7.0).reshape(7, 1).expand(7, 33)),
        ("broadcast scalar", torch.tensor(2.5).expand(3, 4)),
        ("column slice", torch.arange(500.0).reshape(50, 10)[:, :3]),
        ("stepped", torch.arange(99, dtype=torch.int64)[1::2]),
        ("reversed dims", base.permute(2, 1, 0)),
        ("offset view", noise(1001)[3:].clone()[7:]),
        ("transposed over bucket size", big.t()),
        ("strided over bucket size", big[:, ::2]),
        ("channels last", torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)),
    ]


def scalars_and_empties():
    return [
        ("scalar", torch.tensor(3.0)),
        ("empty", torch.empty(0)),
        ("empty rows", torch.empty(0, 4, dtype=torch.bfloat16)),
        ("one byte", torch.tensor([True])),
        ("empty columns", torch.empty(4, 0, dtype=torch.int64)),
        ("empty slice", torch.arange(9, dtype=torch.bfloat16)[3:3]),
        ("int scalar", torch.tensor(-7)),
    ]


def sizes(bucket: int):
    return [
        (f"{n} bytes", noise(n, seed=n % 1000))
        for n in (bucket - 1, 1, bucket, 2, bucket + 1, 3, 3 * bucket + 1, 3 * bucket, 255, 256, 257)
    ]


def all_dtypes():
    adverse = sorted(DTYPES, key=lambda n: (hash_of(n), n))
    return [(f"{i}.{n}", of_dtype(n, 7 + i, i)) for i, n in enumerate([*DTYPES, *adverse])]


def hash_of(text: str) -> int:
    return sum(ord(c) * (i * 31 % 97) for i, c in enumerate(text)) % 101


def autograd_and_lazy():
    parameter = torch.nn.Parameter(torch.rand(5, 5))
    complexes = torch.randn(10, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    return [
        ("parameter", parameter),
        ("result of a computation", parameter @ parameter),
        ("conjugated", complexes.conj()),
        ("negated", complexes.conj().imag),
        ("large parameter", torch.nn.Parameter(torch.rand(3 * MIB // 8, generator=torch.Generator()))),
        ("meta-free nan", torch.tensor([float("nan"), -0.0, 0.0, 1e-45])),
    ]


def odd_names():
    names = [
        "ünïcode.重み.🦆", "with space", "quote'\"s", "new\nline", "nul\0byte", "tab\t", "", "a" * 4096,
        "percent %s {brace}", "../../etc", "\u202eright to left", "e\u0301", "\u00e9",
    ]  # fmt: skip
    return [(name, torch.full((i + 1,), float(i))) for i, name in enumerate(names)]


def tied():
    storage = torch.rand(40, 25)
    return [("embed.weight", storage), ("lm_head.weight", storage), ("view", storage[3:5])]


STREAMS = {
    "layouts": layouts,
    "scalars and empties": scalars_and_empties,
    "sizes around the bucket": lambda: sizes(MIB),
    "all dtypes": all_dtypes,
    "autograd, conj, neg, nan": autograd_and_lazy,
    "odd names": odd_names,
    "tied storage": tied,
    "10,000 tiny": lambda: [(f"t{i}", torch.tensor([i, -i], dtype=torch.int16)) for i in range(10_000)],
    "nothing": list,
    "only empty": lambda: [(f"e{i}", torch.empty(0, i, dtype=torch.float16)) for i in range(50)],
    "first oversize": lambda: [("first", noise(2 * MIB + 5)), ("second", torch.ones(3))],
    "long names, many": lambda: [(f"{i}" + "n" * 4090, torch.tensor(i)) for i in range(2000)],
}
MANY = ("10,000 tiny", "long names, many")


@pytest.mark.parametrize("manifest", [False, True], ids=["generator", "manifest"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in MANY else []) for kind in STREAMS]
)
def test_every_byte_arrives(crew, kind, manifest):
    sent = STREAMS[kind]()
    (received,) = crew.refit(sent, manifest=manifest)
    assert_same(received, sent)
    counts = {k: crew.rollout[0].refit_stats()[k] for k in ("bytes", "tensors")}
    assert counts == {"bytes": sum(t.numel() * t.element_size() for _, t in sent), "tensors": len(sent)}
    assert {k: crew.policy[0].refit_stats()[k] for k in counts} == counts


@pytest.mark.parametrize("bucket", [MIB + 1, MIB + 255, MIB + 12_345])
def test_bucket_that_is_no_multiple_of_anything(bucket):
    sent = [
        *sizes(bucket), *all_dtypes(),
        ("c128", of_dtype("complex128", bucket // 5, 3)), ("f64", of_dtype("float64", bucket // 8 + 1, 4)),
    ]  # fmt: skip
    with Crew(bucket_size=bucket) as crew:
        assert_same(crew.refit(sent)[0], sent)


def test_shapes_and_names_may_change_from_refit_to_refit(crew):
    first = [("a", torch.rand(10, 20)), ("b", noise(2 * MIB))]
    second = [("b", torch.rand(3, 3, dtype=torch.float64)), ("renamed", torch.rand(20, 10)), ("c", noise(5))]
    for sent in (first, second, [], first[::-1], some_weights(), first):
        for manifest in (False, True):
            assert_same(crew.refit(sent, manifest=manifest)[0], sent)


@pytest.mark.slow
def test_values_are_right_after_a_hundred_changing_refits(crew):
    weight = torch.zeros(1000)
    for step in range(100):
        weight += step
        ((_, got),) = crew.refit([("w", weight)])[0]
        assert torch.equal(got, weight)


def test_a_batch_is_valid_until_the_next_one_is_asked_for():
    sent = some_weights(count=10)

    async def keep(engine):
        kept = []
        async for batch in engine.receive_weight_batches():
            assert_same(batch, sent[len(kept) : len(kept) + len(batch)])
            kept += batch
        return kept

    with Crew(poison_released=True) as crew:
        _, kept = crew.attempt([plain(sent)], keep)
    assert [name for name, _ in kept] == [name for name, _ in sent]
    for name, tensor in kept:
        assert torch.equal(tensor, torch.full_like(tensor, 0xFF)), name


def test_a_merged_tensor_outlives_its_batch():
    sent = [("oversize", noise(3 * MIB + 1))]

    async def keep(engine):
        return [pair async for batch in engine.receive_weight_batches() for pair in batch]

    with Crew(poison_released=True) as crew:
        assert_same(crew.attempt([plain(sent)], keep)[1], sent)


def test_the_stream_is_not_gathered_ahead(crew):
    """Of a slow consumer's stream, no more is made than two buckets at each end and the one being packed."""
    made = []

    def weights():
        for i in range(40):
            made.append(i)
            yield f"w{i}", noise(MIB - 256, i)

    async def slowly(engine):
        lead, got = 0, 0
        async for batch in engine.receive_weight_batches():
            time.sleep(0.01)
            lead, got = max(lead, len(made) - got), got + len(batch)
        return lead, got

    _, (lead, got) = crew.attempt([weights()], slowly)
    assert got == 40
    assert lead <= 6


def test_digests_above_63_bits_travel(crew):
    from weightsync.byte_digests import digest_bytes

    sent = [(f"d{i}", noise(64, i)) for i in range(64)]
    assert any(digest_bytes(t) >= 1 << 63 for _, t in sent)
    assert_same(crew.refit(sent)[0], sent)


@pytest.mark.parametrize("manifest", [False, True], ids=["generator", "manifest"])
@pytest.mark.parametrize(
    ("policy", "rollout"),
    [(1, 1), (3, 1), (2, 2), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (3, 4))],
)
def test_topologies(policy, rollout, manifest):
    sent = [*layouts(), *scalars_and_empties(), *some_weights()]
    with Crew(policy, rollout) as crew:
        for _ in range(2):
            outcomes = crew.refit(sent, manifest=manifest)
            assert len(outcomes) == rollout
            for received in outcomes:
                assert_same(received, sent)
        assert all(engine.refit_stats()["seconds_total"] > 0 for engine in crew.engines)


@pytest.mark.parametrize(("policy", "rollout"), [(1, 3), (2, 4)])
def test_more_rollout_than_policy_ranks_is_refused_on_both_sides(policy, rollout):
    engines = [make_engine() for _ in range(2)]
    metadata = [engines[0].prepare()] * policy + [engines[1].prepare()] * rollout
    worlds = {"train_world_size": policy, "rollout_world_size": rollout, "metadata": metadata}
    reason = f"at least as many policy workers.*{policy} policy and {rollout} rollout"
    try:
        with pytest.raises(ConfigurationError, match=reason):
            engines[0].init_policy_process_group(worker_rank=0, **worlds)
        with pytest.raises(ConfigurationError, match=reason):
            engines[1].init_rollout_process_group(rollout_rank=0, **worlds)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("counts", [(5, 0), (0, 5), (0, 0), (40, 3), (3, 40)])
@pytest.mark.parametrize("rollout", [1, 2])
def test_uneven_streams(counts, rollout):
    streams = [[(f"r{r}.{i}", noise(200_000, i)) for i in range(n)] for r, n in enumerate(counts)]
    with Crew(2, rollout) as crew:
        for _ in range(2):
            outcomes = crew.attempt([plain(s) for s in streams])
            assert outcomes[:2] == [None, None]
            for received, sent in zip(outcomes[2:], streams, strict=False):
                assert_same(received, sent)


@pytest.mark.parametrize("at", [1, 3, 11])
def test_a_repeated_name_is_refused_on_both_sides(crew, at):
    sent = some_weights()
    sent[at] = (sent[0][0], sent[at][1])
    sender, receiver = crew.attempt([plain(sent)])
    assert isinstance(sender, ManifestError)
    assert sender.context.tensor == "layer.0.weight"
    assert isinstance(receiver, PeerAbortedError)
    assert "layer.0.weight" in str(receiver)
    assert_same(crew.refit(some_weights(1))[0], some_weights(1))


def spoilt(pairs):
    swapped = [pairs[1], pairs[0], *pairs[2:]]
    reshaped = [(n, t.reshape(-1, 1) if i == 1 else t) for i, (n, t) in enumerate(pairs)]
    recast = [(n, t.view(torch.int8) if i == 1 else t) for i, (n, t) in enumerate(pairs)]
    return {
        "other order": (swapped, pairs[1][0]),
        "one missing": ([pairs[0], *pairs[2:]], pairs[2][0]),
        "last missing": (pairs[:-1], pairs[-1][0]),
        "one extra": ([pairs[0], ("extra", torch.ones(2)), *pairs[1:]], "extra"),
        "extra at the end": ([*pairs, ("extra", torch.ones(2))], "extra"),
        "another shape": (reshaped, pairs[1][0]),
        "another dtype": (recast, pairs[1][0]),
        "nothing comes": ([], pairs[0][0]),
    }


@pytest.mark.parametrize("how", spoilt(some_weights()))
def test_a_stream_that_breaks_its_manifest_names_the_first_mismatch(crew, how):
    promised = some_weights()
    actual, first = spoilt(promised)[how]
    stream = WeightStream(WeightManifest.build(TensorSpec.of(n, t) for n, t in promised), plain(actual))
    sender, receiver = crew.attempt([stream])
    assert isinstance(sender, ManifestError)
    assert sender.context.tensor == first
    assert isinstance(receiver, PeerAbortedError)
    assert receiver.remote.kind == "ManifestError"
    assert receiver.remote.context.tensor == first
    assert_same(crew.refit(promised, manifest=True)[0], promised)


def test_a_name_that_is_no_string_is_refused_at_once(crew):
    started = time.monotonic()
    sender, receiver = crew.attempt([plain([("good", torch.ones(2)), (7, torch.ones(2))])])
    assert isinstance(sender, ManifestError)
    assert isinstance(receiver, PeerAbortedError)
    assert time.monotonic() - started < 2
    assert_same(crew.refit(some_weights())[0], some_weights())


def test_quantised_and_meta_tensors_are_refused_on_both_sides(crew):
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    sender, receiver = crew.attempt([plain([("q", quantised)])])
    assert isinstance(sender, ManifestError)
    assert isinstance(receiver, PeerAbortedError)
    sender, receiver = crew.attempt([plain([("m", torch.ones(3, device="meta"))])])
    assert isinstance(sender, Exception)
    assert isinstance(receiver, PeerAbortedError)
    assert_same(crew.refit(some_weights())[0], some_weights())


def test_equal_epochs_meet_and_the_numbers_may_jump(crew):
    for epoch, version in [(1000, 5), (1001, 6), (2000, 7)]:
        crew.open(epoch, version)
        assert_same(crew.refit(some_weights(epoch))[0], some_weights(epoch))
    assert_same(crew.refit(some_weights())[0], some_weights())


@pytest.mark.parametrize("difference", ["epoch", "version"])
def test_ranks_at_different_epochs_do_not_meet(difference):
    with Crew(connect_s=1.0) as crew:
        policy, rollout = crew.pair
        policy.open_refit(epoch=3, version=3)
        rollout.open_refit(**{"epoch": 3, "version": 3, difference: 4})
        started = time.monotonic()
        outcomes = crew.attempt([plain(some_weights())])
        assert time.monotonic() - started < 3
        for outcome in outcomes:
            assert isinstance(outcome, TransportError)
            assert difference in str(outcome)
        if difference == "epoch":
            assert all(isinstance(outcome, DeadlineError) for outcome in outcomes)
        crew.open(5, 5)
        assert_same(crew.refit(some_weights(5))[0], some_weights(5))


def test_one_side_may_leave_the_epoch_to_the_other(crew):
    for opened in crew.pair:
        opened.open_refit(epoch=50_000 + (opened is crew.pair[1]), version=9)
        assert_same(crew.refit(some_weights())[0], some_weights())


def test_a_consumer_that_does_not_ask_is_no_failure(crew):
    """A receiver ten times slower than the sender finishes as any other."""

    async def dawdle(engine):
        received = []
        async for batch in engine.receive_weight_batches():
            time.sleep(0.1)
            received += [(n, t.clone()) for n, t in batch]
        return received

    sent = some_weights()
    assert_same(crew.attempt([stream_of(sent, manifest=True)], dawdle)[1], sent)


def test_the_manifest_check_sees_every_tensor_before_the_first_batch(crew):
    sent, seen = some_weights(), []
    receiver = crew.rollout[0]
    receiver.manifest_check = seen.append

    async def receive(engine):
        async for _ in engine.receive_weight_batches():
            assert len(seen) == 1

    try:
        assert crew.attempt([stream_of(sent, manifest=True)], receive) == [None, None]
    finally:
        receiver.manifest_check = None
    assert seen == [WeightManifest.build(TensorSpec.of(n, t) for n, t in sent)]


def test_receivers_may_come_first_or_last(crew):
    import asyncio

    async def late(coroutine):
        await asyncio.sleep(0.3)
        return await coroutine

    async def both(first_late):
        send, receive = crew.policy[0].send_weights(plain(some_weights())), collect(crew.rollout[0])
        work = (late(send), receive) if first_late else (send, late(receive))
        return await asyncio.gather(*work)

    for first_late in (True, False):
        assert_same(run(both(first_late))[1], some_weights())


def test_all_errors_are_ours(crew):
    sender, receiver = crew.attempt([plain([("a", torch.ones(1)), ("a", torch.ones(1))])])
    assert isinstance(sender, WeightSyncError)
    assert isinstance(receiver, WeightSyncError)
    assert receiver.remote.traceback
