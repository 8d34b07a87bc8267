"""Topologies as pure data: every rollout rank is reached, once, from a rank that has what it sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigurationError
from weightsync.topology import TOPOLOGIES, RankId, choose_topology, make_topology

SIZES = st.integers(1, 40)


def policy(rank: int) -> RankId:
    return RankId("policy", rank)


def rollout(rank: int) -> RankId:
    return RankId("rollout", rank)


def edges(name: str, train: int, generation: int, **settings) -> set[str]:
    made = make_topology(name, train_world_size=train, rollout_world_size=generation, **settings)
    return {f"{sender.side[0]}{sender.rank}-{receiver.rank}" for sender, receiver in made.edges}


def test_the_connections_of_each_topology():
    assert edges("pairs", 3, 2) == {"p0-0", "p1-1"}
    assert edges("star", 2, 3) == {"p0-0", "p0-1", "p0-2"}
    assert edges("ring", 2, 3) == {"p0-0", "r0-1", "r1-2"}
    assert edges("tree", 2, 7) == {"p0-0", "p0-1", "r0-2", "r0-3", "r1-4", "r1-5", "r2-6"}
    assert edges("tree", 1, 5, fan_out=3) == {"p0-0", "p0-1", "p0-2", "r0-3", "r0-4"}
    assert edges("tree", 1, 4, fan_out=1) == edges("ring", 1, 4)
    assert edges("stripes", 2, 2) == {"p0-0", "p0-1", "p1-0", "p1-1"}


@given(name=st.sampled_from(TOPOLOGIES), train=SIZES, generation=SIZES, fan_out=st.integers(1, 5))
def test_every_rollout_rank_hears_the_whole_stream_and_nobody_waits_in_a_circle(
    name, train, generation, fan_out
):
    if name == "pairs" and generation > train:
        return
    made = make_topology(name, train_world_size=train, rollout_world_size=generation, fan_out=fan_out)
    has = {policy(rank) for rank in range(train)}
    for rank in range(generation):  # in the order of their ranks: a source comes before its targets
        sources = made.sources(rollout(rank))
        assert set(sources) <= has
        assert len(sources) == made.owners
        if made.owners > 1:
            assert [made.share(source.rank) for source in sources] == list(range(made.owners))
        has.add(rollout(rank))
    fans = [len(made.targets(who)) for who in has]
    assert sum(fans) == len(made.edges) == generation * made.owners
    assert (
        max(fans) <= {"pairs": 1, "star": generation, "ring": 1, "tree": fan_out, "stripes": generation}[name]
    )
    senders = [rank for rank in range(train) if made.share(rank) is not None]
    assert senders == [rank for rank in range(train) if made.targets(policy(rank))]


def test_ranks_have_their_place_in_the_metadata_and_outside_of_it_none():
    made = make_topology("star", train_world_size=2, rollout_world_size=3)
    assert [made.index(who) for who in (policy(1), rollout(0), rollout(2))] == [1, 2, 4]
    for who in (policy(2), rollout(3), policy(-1)):
        with pytest.raises(ConfigurationError, match=f"{who} is outside its world"):
            made.sources(who)
    assert made.share(0) == 0
    assert made.share(1) is None


@pytest.mark.parametrize(
    ("allowed", "train", "generation", "chosen", "reason"),
    [
        (TOPOLOGIES, 4, 4, "pairs", "a policy rank of its own"),
        (TOPOLOGIES, 2, 4, "stripes", "all policy ranks send"),
        (TOPOLOGIES, 2, 5, "tree", "they send on what they have"),
        (TOPOLOGIES, 1, 2, "star", "reaches them all at once"),
        (("star",), 4, 4, "star", "the only one that this transport has"),
        (("pairs", "ring"), 1, 2, "ring", "send on"),
        (("stripes",), 3, 1, "stripes", "the only one"),
    ],
)
def test_auto_chooses_and_says_why(allowed, train, generation, chosen, reason):
    made = choose_topology(allowed, train_world_size=train, rollout_world_size=generation)
    assert made.name == chosen
    assert made.reason.startswith("auto: ")
    assert reason in str(made)
    plain = make_topology(chosen, train_world_size=train, rollout_world_size=generation)
    assert (made.edges, made.owners) == (plain.edges, plain.owners)


@given(train=SIZES, generation=SIZES)
def test_auto_fits_all_world_sizes(train, generation):
    choose_topology(TOPOLOGIES, train_world_size=train, rollout_world_size=generation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: edges("pairs", 2, 3), "at least as many policy workers as rollout.*write topology: auto"),
        (lambda: edges("star", 0, 1), "at least one policy and one rollout worker"),
        (lambda: edges("star", 1, 0), "at least one policy and one rollout worker"),
        (lambda: edges("tree", 1, 1, fan_out=0), "fan_out must be at least 1"),
        (
            lambda: edges("mesh", 1, 1),
            "unknown topology 'mesh'; write one of pairs, star, ring, tree, stripes",
        ),
        (
            lambda: choose_topology(("pairs",), train_world_size=1, rollout_world_size=2),
            "none of pairs fits 1 policy and 2 rollout workers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
