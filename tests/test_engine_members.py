"""Rollout ranks that come and go, and refits of some of them: only what changes is connected anew."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine_crew import FAST, MIB, assert_same, collect, plain, run, some_weights
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import ConfigurationError, LifecycleError

pytestmark = [pytest.mark.timeout(60)]

ENGINES = {
    "nixl:tree": ("nixl", {"device": "cpu", "topology": "tree"}),
    "nixl:stripes": ("nixl", {"device": "cpu", "topology": "stripes"}),
    "nixl:auto": ("nixl", {"device": "cpu", "topology": "auto"}),
    "gloo": ("gloo", {}),
    "ipc:star": ("ipc", {"device": "cpu", "topology": "star"}),
    "kimi": ("kimi_ckpt_engine", {}),
}
WAITS = {key: value for key, value in FAST.items() if key != "device"}


class Members:
    """Two policy engines and a changing list of rollout engines, as an elastic driver keeps them."""

    def __init__(self, engine: str, rollout: int) -> None:
        self.name, self.settings = ENGINES[engine]
        self.policy = [self.make() for _ in range(2)]
        self.rollout = [self.make() for _ in range(rollout)]
        self.metadata = {engine: engine.prepare() for engine in self.all}
        self.epoch = 0
        for rank, each in enumerate(self.policy):
            each.init_policy_process_group(worker_rank=rank, **self.worlds)
        for rank, each in enumerate(self.rollout):
            each.init_rollout_process_group(rollout_rank=rank, **self.worlds)

    def make(self) -> CheckpointEngine:
        return create_checkpoint_engine(
            self.name, bucket_size_bytes=MIB, engine_kwargs={**WAITS, **self.settings}
        )

    @property
    def all(self) -> list[CheckpointEngine]:
        return [*self.policy, *self.rollout]

    @property
    def worlds(self) -> dict:
        return {
            "train_world_size": len(self.policy),
            "rollout_world_size": len(self.rollout),
            "metadata": [self.metadata[each] for each in self.all],
        }

    def change(self, *, remove: tuple[int, ...] = (), add: int = 0) -> list[int]:
        """Remove and add rollout ranks; returns the ranks of the new ones."""
        stay = [each for rank, each in enumerate(self.rollout) if rank not in remove]
        for rank in remove:
            self.rollout[rank].close()
        new = [self.make() for _ in range(add)]
        self.metadata |= {each: each.prepare() for each in new}
        self.rollout = [*stay, *new]
        for side in (self.policy, self.rollout):
            for rank, each in enumerate(side):
                if each in new:
                    each.init_rollout_process_group(rollout_rank=rank, **self.worlds)
                else:
                    each.update_process_group(rank=rank, **self.worlds)
        return list(range(len(stay), len(self.rollout)))

    def refit(self, receivers: list[int] | None = None, seed: int = 0) -> None:
        """Refit some rollout ranks, or all; every one of them gets every byte."""
        self.epoch += 1
        chosen = range(len(self.rollout)) if receivers is None else receivers
        taking_part = [self.rollout[rank] for rank in chosen]
        for each in (*self.policy, *taking_part):
            each.open_refit(epoch=self.epoch, version=seed, receivers=receivers)
        weights = some_weights(seed=seed)

        async def everyone():
            sends = [each.send_weights(plain(weights)) for each in self.policy]
            return await asyncio.gather(*sends, *map(collect, taking_part))

        for received in run(everyone())[len(self.policy) :]:
            assert_same(sorted(received), sorted(weights))

    def close(self) -> None:
        for each in self.all:
            each.close()


@pytest.fixture
def members(request):
    made = Members(request.param, 2)
    yield made
    made.close()


def buffers_of(engine) -> list[int]:
    return [buffer.data_ptr() for buffer in engine._memory.buffers]


def control_links(engine) -> set:
    return set(engine._session._made.values())


@pytest.mark.nixl
@pytest.mark.parametrize("members", ENGINES, indirect=True)
def test_ranks_come_and_go_between_refits(members):
    members.refit(seed=1)
    kept, buffers = control_links(members.rollout[0]), buffers_of(members.policy[0])
    new = members.change(add=2)
    members.refit(new, seed=1)
    members.refit(seed=2)
    assert buffers_of(members.policy[0])[: len(buffers)] == buffers
    members.change(remove=(1,))
    members.refit(seed=3)
    assert kept & control_links(members.rollout[0])
    members.change(remove=(1, 2), add=1)
    members.refit([1], seed=3)
    members.refit(seed=4)
    members.change(remove=(0,))
    members.refit(seed=5)


@pytest.mark.nixl
@pytest.mark.parametrize("members", ["nixl:auto"], indirect=True)
def test_what_cannot_be_is_refused_and_the_group_goes_on(members):
    engine = members.policy[0]
    for receivers in ([2], [1, 0], [0, 0], [-1]):
        with pytest.raises(ConfigurationError, match="rollout ranks below 2, in order"):
            engine.open_refit(epoch=1, version=1, receivers=receivers)
    with pytest.raises(ConfigurationError, match="at least one policy and one rollout"):
        engine.open_refit(epoch=1, version=1, receivers=[])
    late = members.make()
    late.prepare()
    with pytest.raises(LifecycleError, match="has not joined"):
        late.update_process_group(rank=0, **members.worlds)
    late.close()
    with pytest.raises(ConfigurationError, match="is outside its world"):
        engine.update_process_group(rank=2, **members.worlds)
    members.refit([1])
    members.refit()
