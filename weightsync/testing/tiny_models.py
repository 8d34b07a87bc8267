"""Tiny random Hugging Face checkpoints for tests and demonstrations: made in a second, never downloaded.

Two layers of 128 channels with a byte tokenizer. Wide enough that different seeds give different greedy
tokens, small enough that an inference engine starts in seconds. Needs ``transformers``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

from weightsync.errors import ConfigurationError, MissingDependencyError

TinyKind = Literal["qwen3", "qwen3tied", "qwen3moe", "llama"]

VOCAB_SIZE = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_tiny_model(
    kind: TinyKind, seed: int, dtype: torch.dtype = torch.bfloat16, *, vocab_size: int = VOCAB_SIZE
) -> torch.nn.Module:
    """Return a tiny random causal language model (transformers), in evaluation mode.

    Args:
        kind: ``qwen3`` and ``llama`` are dense and untied, ``qwen3tied`` shares the embedding with the
            output layer, ``qwen3moe`` has four experts a layer.
        seed: fixes the weights; the caller's random state is left alone.
        dtype: dtype of the parameters.
        vocab_size: rows of the embedding; at least the tokenizer's 259.

    Raises:
        ConfigurationError: unknown kind.
        MissingDependencyError: ``transformers`` is not installed.
    """
    model_cls, config = _architecture(kind, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = model_cls(config).to(dtype).eval()
    return model


def make_tiny_checkpoint(
    kind: TinyKind,
    path: str | Path,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Save a tiny random model with its byte tokenizer under ``path``; see `make_tiny_model`.

    Returns:
        The directory, which an engine can load as a model.
    """
    directory = Path(path)
    model: Any = make_tiny_model(kind, seed, dtype, vocab_size=vocab_size)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def byte_tokenizer() -> Any:
    """Return a transformers tokenizer with one token a byte, and ``<|bos|>``, ``<|eos|>``, ``<|pad|>``."""
    transformers = _transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )


def _architecture(kind: TinyKind, vocab_size: int) -> tuple[Any, Any]:
    if kind not in get_args(TinyKind):
        raise ConfigurationError(f"unknown tiny model {kind!r}; known: {', '.join(get_args(TinyKind))}")
    hf = _transformers()
    sizes = {**_SIZES, "vocab_size": vocab_size, "tie_word_embeddings": kind == "qwen3tied"}
    if kind == "llama":
        return hf.LlamaForCausalLM, hf.LlamaConfig(**sizes)
    if kind == "qwen3moe":
        return hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**sizes, **_EXPERTS)
    return hf.Qwen3ForCausalLM, hf.Qwen3Config(**sizes)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "tiny models need transformers: pip install 'weightsync[demo]'"
        ) from error
    return transformers
