"""The whole run: start the workers, train, and say whether it worked.

Run it as ``weightsync demo``, or as ``python -m examples.grpo.run``; both take the same options.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from weightsync.cluster.base import RolloutGroup, WorkerGroup
from weightsync.cluster.private_ray import private_ray
from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup, ray_colocated_groups
from weightsync.config import load_refit_config
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

from .config import DemoConfig, load_config
from .loop import GrpoRun
from .model import default_cache, make_task, prepare_checkpoint
from .report import plot, print_summary, step_line, write_result
from .verdict import RunResult, judge
from .workers import Workers

HERE = Path(__file__).parent
DEFAULT_CONFIG = HERE / "smollm2.yaml"
DEFAULT_OUTPUT = Path("outputs/demo")
RESULT_FILE = "result.json"
PLOT_FILE = "demo.png"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    config: Path = DEFAULT_CONFIG
    output: Path = DEFAULT_OUTPUT
    steps: int | None = None
    seed: int | None = None
    refit: bool = True
    transport: str | None = None
    shard_weights: str | None = None


def run(options: Options) -> int:
    """Do a whole run; returns the exit status: 0 if both checks passed, 1 if not.

    Raises:
        WeightSyncError: a setting is wrong, a package is missing, or a refit failed.
    """
    began = time.monotonic()
    console = Console()
    config = load_config(
        _find(options.config),
        steps=options.steps,
        seed=options.seed,
        transport=options.transport,
        shard_weights=options.shard_weights,
    )
    load_refit_config(config.refit_source)  # a wrong setting must not wait until all workers are up
    checkpoint = prepare_checkpoint(config.policy.model, default_cache(), console.print)
    task = make_task(config.grpo.task, checkpoint)
    result = RunResult(
        model=config.policy.model,
        task=config.grpo.task,
        seed=config.seed,
        refit=options.refit,
        tolerance=config.check.logprob_tolerance,
    )
    engines = "a vLLM engine in each" if config.shares_processes else "one vLLM engine"
    console.print(f"Starting Ray, {config.policy.workers} policy workers and {engines} ...")
    with private_ray(config.policy.workers + 1, python_path=_import_root()) as ray:
        workers = Workers(ray, checkpoint, config, task.stop_token_ids)
        workers.start()
        with _synchronizer(workers, config, options.refit) as synchronizer:
            console.print(f"Ready after {time.monotonic() - began:.0f} s.")
            loop = GrpoRun(workers, task, config, synchronizer)
            _run_steps(loop, config.grpo.steps, result, console, options.output)
    result.wall_seconds = time.monotonic() - began
    return _conclude(console, config, options.output, result)


def _find(config: Path) -> Path:
    """Take a bare file name that is not in the working directory as one of the files beside this module."""
    beside = HERE / config
    return beside if not config.exists() and len(config.parts) == 1 and beside.is_file() else config


def _import_root() -> Path:
    """Return the folder from which actors can import this package under the name that it has here."""
    return HERE.parents[len(__name__.split(".")) - 2]


@contextmanager
def _synchronizer(
    workers: Workers, config: DemoConfig, refit: bool
) -> Iterator[CheckpointEngineWeightSynchronizer | None]:
    """Yield what moves the weights, connected; nothing where the refit is switched off."""
    if not refit:
        yield None
        return
    groups: tuple[WorkerGroup, RolloutGroup] = (
        ray_colocated_groups(workers.policy)
        if config.shares_processes
        else (RayPolicyGroup(workers.policy), RayRolloutGroup(workers.engines))
    )
    with CheckpointEngineWeightSynchronizer(*groups, config.refit_source) as synchronizer:
        synchronizer.init_communicator()
        yield synchronizer


def _run_steps(loop: GrpoRun, steps: int, result: RunResult, console: Console, output: Path) -> None:
    result.held_out_before = loop.held_out()
    for number in range(1, steps + 1):
        record = loop.step(number)
        result.steps.append(record)
        console.print(step_line(record, result.tolerance), soft_wrap=True, highlight=False)
        write_result(output / RESULT_FILE, result)
    result.held_out_after = loop.held_out()


def _conclude(console: Console, config: DemoConfig, output: Path, result: RunResult) -> int:
    verdict = judge(result, config.check)
    write_result(output / RESULT_FILE, result, verdict)
    plot(output / PLOT_FILE, result)
    print_summary(console, result, verdict)
    console.print(f"Written: {output / RESULT_FILE}, {output / PLOT_FILE}")
    return 0 if verdict.passed else 1


def main(argv: list[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description="GRPO with FSDP2 policy workers, vLLM, and weightsync between."
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--transport", help="refit_transport, instead of the file's")
    parser.add_argument("--shard-weights", help="none, experts, all or auto, instead of the file's")
    parser.add_argument(
        "--no-refit", action="store_true", help="leave vLLM on its first weights, to see what happens"
    )
    given = parser.parse_args(argv)
    return run(
        Options(
            config=given.config,
            output=given.output,
            steps=given.steps,
            seed=given.seed,
            refit=not given.no_refit,
            transport=given.transport,
            shard_weights=given.shard_weights,
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
