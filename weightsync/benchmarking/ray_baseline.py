"""Ray's own direct transport between two actors, ``tensor_transport="nixl"``, as a trial."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.benchmarking.baselines import KIND, Clock
from weightsync.benchmarking.crew import ANSWER_S, Crew
from weightsync.benchmarking.shapes import WHOLE, ModelHandle, Part
from weightsync.benchmarking.trial import BenchSettings, Trial
from weightsync.benchmarking.workers import Holder, Stretch
from weightsync.cluster.private_ray import private_ray
from weightsync.errors import MissingDependencyError

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "WARN"}


class RayMember:
    """An actor, asked like a process of a crew."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._pending: Any = None

    def start(self, method: str, *args: Any) -> None:
        """Ask for a method without waiting."""
        self._pending = self.call(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        """Return the reference to what a method returns, which may not be there yet."""
        return getattr(self._actor, method).remote(*args)

    def result(self) -> Any:
        """Wait for the answer; the method's error is raised here."""
        return self.get(self._pending)

    def get(self, reference: Any) -> Any:
        """Wait for what a reference stands for."""
        return self._ray.get(reference, timeout=ANSWER_S)


class RayTrial(Trial):
    """(d) Policy rank 0 returns its tensors, Ray moves them, every rollout rank copies them in."""

    kind, name = KIND, "Ray direct"

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings

    @contextmanager
    def crew(self, model: ModelHandle) -> Iterator[Crew]:
        """Yield actors of a Ray of their own; all of it is gone afterwards."""
        if importlib.util.find_spec("nixl") is None:
            raise MissingDependencyError("Ray's direct transport needs NIXL: pip install 'weightsync[nixl]'")
        settings = self._settings
        with private_ray(1 + settings.rollout_ranks, environment=_ENVIRONMENT, log_to_driver=False) as ray:
            actor_class = ray.remote(num_cpus=1, enable_tensor_transport=True)(_holder_class(ray))

            def make(side: str, part: Part = WHOLE) -> RayMember:
                return RayMember(ray, actor_class.remote(model, (side,), settings.threads, part))

            self._sender = make("policy")
            ways = settings.rollout_tp
            parts = [Part(rank % ways, ways) for rank in range(settings.rollout_ranks)]
            yield Crew([self._sender], [make("rollout", part) for part in parts], parts=parts)

    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Hand the sender's tensors to every receiver."""
        begun = self._sender.call("begun")
        weights = self._sender.call("weights")
        for member in crew.rollout:
            member.start("take", weights)
        taken: list[Stretch] = [member.result() for member in crew.rollout]
        start = self._sender.get(begun).start
        return [
            Stretch("rollout", start, each.end, {"transfer": each.start - start, **each.phases})
            for each in taken
        ]


def _holder_class(ray: Any) -> type[Holder]:
    class RayHolder(Holder):
        """What an actor does."""

        def begun(self) -> Stretch:
            """Return the time at which this refit begins here."""
            return Clock().stretch("policy")

        @ray.method(tensor_transport="nixl")  # type: ignore[untyped-decorator]
        def weights(self) -> list[torch.Tensor]:
            """Return the parameters, which Ray then moves."""
            return list(self.policy.values())

        def take(self, weights: list[torch.Tensor]) -> Stretch:
            """Copy what came into the served parameters."""
            clock = Clock()
            with clock.phase("load"):
                self.load(zip(self.served, weights, strict=True))
            return clock.stretch("rollout")

    return RayHolder
