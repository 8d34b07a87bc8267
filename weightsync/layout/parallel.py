"""How the ranks of each side are arranged: ``tp=1,pp=16,ep=16`` read, checked, and numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.layout.regions import Ints

POLICY_KEYS = ("tp", "pp", "ep", "etp", "cp", "dp", "first", "last", "fsdp", "replicate")
ROLLOUT_KEYS = ("tp", "pp", "dp", "ep")


def parse_sizes(text: str, known: Sequence[str], option: str) -> dict[str, int]:
    """Read ``key=number`` pairs, separated by commas.

    Raises:
        ConfigurationError: an unknown or repeated key, or a value that is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if key not in known:
            raise ConfigurationError(
                f"{option} does not know {key!r}; write {', '.join(f'{each}=N' for each in known)}, "
                "separated by commas"
            )
        if key in sizes:
            raise ConfigurationError(f"{option} has {key} twice; write it once")
        if not equals or not value.isdecimal() or int(value) < 1:
            raise ConfigurationError(f"{option}: {key} must be a number of at least 1; write {key}=1")
        sizes[key] = int(value)
    return sizes


@dataclass(frozen=True)
class PolicyGrid:
    """Megatron's arrangement of policy ranks. Experts have their own, within the same pipeline stages.

    Attributes:
        ranks: world size.
        tp: tensor-parallel size.
        pp: pipeline stages.
        ep: expert-parallel size.
        etp: tensor-parallel size within an expert.
        first: layers of the first stage; `None`: its even part.
        last: layers of the last stage, likewise.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, sizes: Mapping[str, int], ranks: int) -> PolicyGrid:
        """Make a grid from ``--policy``.

        Raises:
            ConfigurationError: the sizes do not divide the number of ranks.
        """
        grid = {key: sizes.get(key, 1) for key in ("tp", "pp", "ep")}
        etp = sizes.get("etp", 1 if grid["ep"] > 1 else grid["tp"])
        _require_divides("policy", ranks, tp=grid["tp"], cp=sizes.get("cp", 1), pp=grid["pp"])
        if "dp" in sizes:
            _require_product(ranks, tp=grid["tp"], cp=sizes.get("cp", 1), pp=grid["pp"], dp=sizes["dp"])
        _require_divides("policy", ranks, etp=etp, ep=grid["ep"], pp=grid["pp"])
        return cls(ranks, **grid, etp=etp, first=sizes.get("first"), last=sizes.get("last"))

    def dense(self) -> Ints:
        """Return the ranks as an array of shape ``(pp, replicas, tp)``."""
        return np.arange(self.ranks, dtype=np.int64).reshape(self.pp, -1, self.tp)

    def expert(self) -> Ints:
        """Return the ranks as an array of shape ``(pp, replicas, ep, etp)``."""
        return np.arange(self.ranks, dtype=np.int64).reshape(self.pp, -1, self.ep, self.etp)

    def stages(self, layers: int) -> list[int]:
        """Return the stage of each layer.

        Raises:
            ConfigurationError: there are more stages than layers, or the ends leave the others none.
        """
        ends = {0: self.first, self.pp - 1: self.last}
        given = {stage: count for stage, count in ends.items() if count is not None}
        free = [stage for stage in range(self.pp) if stage not in given]
        rest = layers - sum(given.values())
        if rest < len(free) or (rest and not free):
            raise ConfigurationError(
                f"{layers} layers do not fill pp={self.pp} policy stages"
                + (f" with {given} layers in stages" if given else "")
                + "; write a smaller pp, or other first= and last="
            )
        counts = dict(given)
        base, extra = divmod(rest, len(free)) if free else (0, 0)
        # The first and the last stage also have the embeddings: what is left over goes to those between them.
        by_load = sorted(free, key=lambda stage: (stage in (0, self.pp - 1), stage))
        for place, stage in enumerate(by_load):
            counts[stage] = base + (place < extra)
        return [stage for stage in range(self.pp) for _ in range(counts[stage])]


@dataclass(frozen=True)
class ShardedGrid:
    """The arrangement of an FSDP2 policy: a mesh of replicas, shards and tensor-parallel ranks."""

    ranks: int
    replicate: int
    fsdp: int
    tp: int

    @classmethod
    def parse(cls, sizes: Mapping[str, int], ranks: int) -> ShardedGrid:
        """Make a mesh from ``--policy fsdp=N,...``.

        Raises:
            ConfigurationError: a size that FSDP2 does not have, or a product that is not the number of ranks.
        """
        odd = [key for key in sizes if key not in ("fsdp", "tp", "replicate")]
        if odd:
            raise ConfigurationError(
                f"--policy: {odd[0]} does not go with fsdp; write fsdp=N with tp=N and replicate=N, or "
                "tp, pp, ep"
            )
        fsdp, tp = sizes["fsdp"], sizes.get("tp", 1)
        if ranks % (fsdp * tp):
            raise ConfigurationError(
                f"fsdp={fsdp},tp={tp} does not divide {ranks} policy ranks; write --policy-ranks "
                f"{-(-ranks // (fsdp * tp)) * fsdp * tp}"
            )
        replicate = sizes.get("replicate", ranks // (fsdp * tp))
        if replicate * fsdp * tp != ranks:
            raise ConfigurationError(
                f"replicate={replicate},fsdp={fsdp},tp={tp} makes {replicate * fsdp * tp} policy ranks, not "
                f"{ranks}; write --policy-ranks {replicate * fsdp * tp}"
            )
        return cls(ranks, replicate, fsdp, tp)

    def mesh(self) -> Ints:
        """Return the ranks as an array of shape ``(replicate, fsdp, tp)``."""
        return np.arange(self.ranks, dtype=np.int64).reshape(self.replicate, self.fsdp, self.tp)


@dataclass(frozen=True)
class RolloutGrid:
    """vLLM's arrangement of rollout ranks: engines of ``dp * pp * tp`` ranks each.

    Attributes:
        ranks: of all engines together.
        tp: tensor-parallel size.
        pp: pipeline stages.
        dp: data-parallel replicas of the attention within an engine.
        expert_parallel: whether whole experts are distributed (over ``dp * tp`` ranks), or each is cut.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @classmethod
    def parse(cls, sizes: Mapping[str, int], ranks: int) -> RolloutGrid:
        """Make a grid from ``--rollout``.

        ``ep`` may be left out; where it is above 1, it is ``tp * dp``, and ``dp`` follows from it.

        Raises:
            ConfigurationError: sizes that vLLM does not have, or that do not divide the number of ranks.
        """
        tp, pp, ep = (sizes.get(key, 1) for key in ("tp", "pp", "ep"))
        dp = sizes.get("dp", ep // tp if ep > tp and ep % tp == 0 else 1)
        if ep not in (1, tp * dp):
            raise ConfigurationError(
                f"vLLM distributes experts over all tp * dp ranks; with tp={tp},dp={dp} write ep={tp * dp} "
                "or ep=1"
            )
        _require_divides("rollout", ranks, tp=tp, pp=pp, dp=dp)
        return cls(ranks, tp, pp, dp, ep > 1)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.tp * self.dp

    def grid(self) -> Ints:
        """Return the ranks as an array of shape ``(engines, dp, pp, tp)``."""
        return np.arange(self.ranks, dtype=np.int64).reshape(-1, self.dp, self.pp, self.tp)

    def stages(self, layers: int) -> list[int]:
        """Return the stage of each layer, as vLLM distributes them.

        Raises:
            ConfigurationError: more stages than layers.
        """
        if self.pp > layers:
            raise ConfigurationError(
                f"{layers} layers do not fill pp={self.pp} stages; write pp={layers} or less"
            )
        base, extra = divmod(layers, self.pp)
        counts = [base] * self.pp
        for place in range(2, extra + 2):
            counts[-place] += 1
        return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _require_product(ranks: int, **sizes: int) -> None:
    needed = prod(sizes.values())
    if needed != ranks:
        form = ",".join(f"{key}={size}" for key, size in sizes.items())
        raise ConfigurationError(
            f"{form} makes {needed} policy ranks, not {ranks}; write --policy-ranks {needed}, or leave dp out"
        )


def _require_divides(side: str, ranks: int, **sizes: int) -> None:
    needed = prod(sizes.values())
    if ranks < 1 or ranks % needed:
        form = ",".join(f"{key}={size}" for key, size in sizes.items() if size > 1 or key != "cp")
        raise ConfigurationError(
            f"{form} needs a multiple of {needed} {side} ranks, got {ranks}; write --{side}-ranks "
            f"{max(-(-ranks // needed), 1) * needed}"
        )
