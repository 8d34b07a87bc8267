"""One refit over NIXL, end to end, against one plain copy through shared memory, taken in turns.

Two processes on one machine hold random values of Qwen3-0.6B's shapes (bf16, tied embeddings): this one the
trained parameters, a child the served ones. The limit is one copy of those bytes by the child, from shared
memory into its parameters. A refit is everything from the trained parameter to the served one: packing,
digests, transfer, checks and loading. Speeds swing with the machine's other load, so the ratio of two
neighbouring measurements is the figure to look at.

    python benchmarks/refit.py --layers 8 --repeats 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import torch
import torch.multiprocessing as mp

from weightsync.engines.nixl import preinit_nixl_agent
from weightsync.policy import PolicyCheckpointEngineMixin, weight_stream_from
from weightsync.rollout.module import ModuleRolloutWorker, named_state
from weightsync.tensors import WeightStream, digest_bytes, flat_bytes

MIB = 1 << 20
HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 1024, 3072, 151936, 16, 8, 128, 28
WARM_UPS = 2
ANSWER_S = 600.0


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return Qwen3-0.6B's parameter names and shapes, with ``layers`` of its 28 layers."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    each = {
        "input_layernorm.weight": (HIDDEN,),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    }
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in each.items()}
    found["model.norm.weight"] = (HIDDEN,)
    return found


def build_module(layers: int, seed: int) -> torch.nn.Module:
    """Make a module with those parameters, of random values."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.nn.Module()
    for name, shape in shapes(layers).items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        values = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1.0, 1.0, generator=generator)
        module.register_parameter(last, torch.nn.Parameter(values, requires_grad=False))
    return root


class PeakMemory:
    """The most resident memory that this process has had since `mark`, sampled every few milliseconds."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base = self._peak = 0
        threading.Thread(target=self._run, daemon=True).start()

    def mark(self) -> None:
        """Count from here."""
        self._base = self._peak = self._process.memory_info().rss

    def extra(self) -> int:
        """Return the bytes above the mark."""
        return self._peak - self._base

    def _run(self) -> None:
        while True:
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(0.005)


def value_of(outcome: dict[str, Any]) -> Any:
    """Return the value of a worker's outcome; a failure ends the benchmark."""
    if "error" in outcome:
        raise SystemExit(f"{outcome['error']['kind']}: {outcome['error']['message']}")
    return outcome["value"]


def rollout_main(commands: Connection, shared: torch.Tensor, options: argparse.Namespace) -> None:
    """Serve: hold the served parameters, and do what the parent asks for."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the refit line must not mix with --json
    torch.set_num_threads(options.threads)
    module = build_module(options.layers, seed=2)
    preinit_nixl_agent()
    worker, memory = ModuleRolloutWorker(module), PeakMemory()
    targets = [tensor.view(-1).view(torch.uint8) for _, tensor in named_state(module)]
    while (command := commands.recv())[0] != "end":
        match command:
            case ("copy",):
                answer: Any = copy_once(shared, targets)
            case ("call", method, kwargs):
                answer = value_of(worker.checkpoint_engine_rpc(method, kwargs)[0])
            case ("mark",):
                memory.mark()
                answer = None
            case _:
                answer = {"extra": memory.extra(), "digest": [digest_bytes(target) for target in targets]}
        commands.send(answer)


def copy_once(source: torch.Tensor, targets: list[torch.Tensor]) -> float:
    """Copy flat bytes into the targets one after the other; return the seconds."""
    started = time.perf_counter()
    for target, piece in zip(
        targets, torch.split(source, [target.numel() for target in targets]), strict=True
    ):
        target.copy_(piece)
    return time.perf_counter() - started


class Rollout:
    """The child process, as the parent sees it."""

    def __init__(self, shared: torch.Tensor, options: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=rollout_main, args=(theirs, shared, options), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, *command: Any) -> None:
        """Ask for something without waiting."""
        self._commands.send(command)

    def answer(self) -> Any:
        """Wait for the answer."""
        if not self._commands.poll(ANSWER_S):
            raise SystemExit(f"the rollout process did not answer in {ANSWER_S:g} s")
        try:
            return self._commands.recv()
        except EOFError:
            raise SystemExit("the rollout process died; its error is above") from None

    def ask(self, *command: Any) -> Any:
        """Ask for something and wait for it."""
        self.start(*command)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        self._commands.send(("end",))
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


class Policy(PolicyCheckpointEngineMixin):
    """The policy worker: this process."""

    rank = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def weight_stream(self) -> WeightStream:
        """Return the trained parameters."""
        return weight_stream_from(self.module)

    def ask(self, method: str, **kwargs: Any) -> Any:
        """Run one method of the worker protocol."""
        return value_of(self.checkpoint_engine_rpc(method, kwargs))


@contextmanager
def connected(policy: Policy, rollout: Rollout, options: argparse.Namespace) -> Iterator[None]:
    """Make both engines and connect them."""
    init = {
        "backend": "nixl",
        "bucket_size_bytes": options.bucket_mib * MIB,
        "engine_kwargs": {"device": "cpu", "verify": options.verify},
    }
    policy.ask("init_checkpoint_engine", **init)
    rollout.ask("call", "init_checkpoint_engine", init)
    metadata = [policy.ask("prepare_checkpoint_engine"), rollout.ask("call", "prepare_checkpoint_engine", {})]
    worlds: dict[str, Any] = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
    policy.ask("init_checkpoint_engine_process_group", **worlds)
    rollout.ask("call", "init_checkpoint_engine_process_group", {"rank_prefix": 0, **worlds})
    try:
        yield
    finally:
        rollout.ask("call", "close_checkpoint_engine", {})
        policy.ask("close_checkpoint_engine")


def refit_once(policy: Policy, rollout: Rollout, version: int) -> dict[str, Any]:
    """Send every parameter; return seconds in all and by phase of either side."""
    policy.ask("open_refit", epoch=version, version=version)
    rollout.ask("call", "open_refit", {"epoch": version, "version": version})
    started = time.perf_counter()
    rollout.start("call", "update_weights_from_checkpoint_engine", {})
    sent = policy.ask("send_weights_via_checkpoint_engine")
    received = rollout.answer()
    rollout.ask("call", "commit_refit", {"version": version})
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "policy": sent["seconds"], "rollout": received["seconds"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark."""
    torch.set_num_threads(options.threads)
    module = build_module(options.layers, seed=1)
    parts = [flat_bytes(tensor) for _, tensor in named_state(module)]
    shared = torch.cat(parts)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    preinit_nixl_agent()
    rollout, memory = Rollout(shared, options), PeakMemory()
    rollout.ask("copy")
    memory.mark()
    rollout.ask("mark")
    copies, refits = [], []
    policy = Policy(module)
    with connected(policy, rollout, options):
        for version in range(-WARM_UPS, options.repeats):
            with torch.no_grad():
                module.get_parameter("model.norm.weight").add_(1.0)  # so that a refit has something to bring
            copies.append(rollout.ask("copy"))
            refits.append(refit_once(policy, rollout, version + WARM_UPS + 1))
            state = rollout.ask("state")
            if state["digest"] != [digest_bytes(part) for part in parts]:
                raise SystemExit("the served parameters differ from the trained ones")
    rollout.end()
    peaks = {"policy": memory.extra(), "rollout": state["extra"]}
    return summary(shared.numel(), copies[WARM_UPS:], refits[WARM_UPS:], peaks, options)


def summary(
    nbytes: int,
    copies: list[float],
    refits: list[dict[str, Any]],
    peaks: dict[str, int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the medians."""
    ratios = [refit["seconds"] / copy for refit, copy in zip(refits, copies, strict=True)]
    phases = {
        side: {phase: median(refit[side].get(phase, 0.0) for refit in refits) for phase in refits[0][side]}
        for side in ("policy", "rollout")
    }
    copy_s, refit_s = median(copies), median(refit["seconds"] for refit in refits)
    return {
        "bytes": nbytes,
        "copy_seconds": copy_s,
        "copy_gb_per_s": nbytes / copy_s / 1e9,
        "refit_seconds": refit_s,
        "refit_gb_per_s": nbytes / refit_s / 1e9,
        "refit_over_copy": median(ratios),
        "refit_over_copy_range": [min(ratios), max(ratios)],
        "seconds_by_phase": phases,
        "peak_extra_bytes": peaks,
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
    }


def report(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    low, high = figures["refit_over_copy_range"]
    lines = [
        f"{figures['bytes'] / 1e9:.3f} GB in {figures['settings']['repeats']} repeats, medians:",
        f"  one plain copy   {figures['copy_seconds']:8.3f} s  {figures['copy_gb_per_s']:6.2f} GB/s",
        f"  refit over NIXL  {figures['refit_seconds']:8.3f} s  {figures['refit_gb_per_s']:6.2f} GB/s",
        f"  a refit takes {figures['refit_over_copy']:.1f} times a copy ({low:.1f} to {high:.1f})",
    ]
    for side, phases in figures["seconds_by_phase"].items():
        shown = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())
        extra = figures["peak_extra_bytes"][side] / MIB
        lines.append(f"  {side}: {shown} s; at most {extra:.0f} MiB more memory")
    return "\n".join(lines)


def default_threads() -> int:
    """Return each process's share of the cores: threads beyond them only get in each other's way."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=LAYERS, help="of Qwen3-0.6B's 28 (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64, help="MiB of each of the two buckets")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of torch, in each process")
    parser.add_argument("--verify", choices=("full", "off"), default="full", help="digests of every bucket")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_options()
    figures = measure(options)
    print(json.dumps(figures, indent=2) if options.json else report(figures))


if __name__ == "__main__":
    main()
