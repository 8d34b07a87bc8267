"""The benchmark's model: Qwen3-0.6B's shapes, and the policy's parameters in memory that processes share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from weightsync.buckets import align_up
from weightsync.engines.buffers import allocate_host
from weightsync.errors import ConfigurationError
from weightsync.layout.regions import Box

LAYERS = 28
HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 151936, 16, 8, 128
DTYPE = torch.bfloat16

_BLOCK_BYTES = 16 << 20
_BELOW_TWO = 0xBFFF_BFFF_BFFF_BFFF
"""Takes the highest exponent bit of four bf16 values away: no infinities, no NaNs, all below 2."""

_CUT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """What one of ``ranks`` tensor-parallel ranks stores of each parameter; by default all of it."""

    rank: int = 0
    ranks: int = 1

    def box(self, name: str, shape: Sequence[int]) -> Box:
        """Return the region of a whole parameter.

        Raises:
            ConfigurationError: it cannot be cut into so many equal parts.
        """
        if self.ranks == 1 or name.endswith("norm.weight"):
            return Box.whole(shape)
        axis = 1 if name.endswith(_CUT_BY_COLUMNS) else 0
        if shape[axis] % self.ranks:
            raise ConfigurationError(f"{self.ranks} tensor-parallel ranks do not divide {name} {list(shape)}")
        size = shape[axis] // self.ranks
        lo, hi = [0] * len(shape), list(shape)
        lo[axis], hi[axis] = self.rank * size, (self.rank + 1) * size
        return Box(tuple(lo), tuple(hi))

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of that region."""
        box = self.box(name, tensor.shape)
        return tensor[tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))]


WHOLE = Part()


def parameter_shapes(layers: int, part: Part = WHOLE) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of Qwen3-0.6B with ``layers`` of its 28 layers; embeddings are tied.

    Raises:
        ConfigurationError: ``layers`` is not 1 to 28, or there is no such part.
    """
    if not 1 <= layers <= LAYERS:
        raise ConfigurationError(f"Qwen3-0.6B has {LAYERS} layers, got layers={layers}")
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
    blocks = {
        f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in each.items()
    }
    embeddings = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    whole = {**embeddings, **blocks, "model.norm.weight": (HIDDEN,)}
    return {name: part.box(name, shape).shape for name, shape in whole.items()}


def model_bytes(layers: int, part: Part = WHOLE) -> int:
    """Return the bytes of all parameters, or of a part of them."""
    return sum(prod(shape) for shape in parameter_shapes(layers, part).values()) * DTYPE.itemsize


def new_parameters(layers: int, part: Part = WHOLE) -> Parameters:
    """Return parameters of a process's own, every page touched; large pages, where the system has them."""
    *_, (_, shape, start) = _places(layers, part)
    whole = allocate_host(start + prod(shape) * DTYPE.itemsize).zero_()
    return _within(whole, layers, part)


@dataclass(frozen=True)
class ModelHandle:
    """From what another process of this machine finds the policy's parameters, while their owner lives."""

    path: str
    layers: int

    def attach(self) -> Parameters:
        """Map the parameters and touch every page; they stay mapped while a tensor of them lives."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        whole.view(torch.int64).sum()
        return _within(whole, self.layers)


class SharedModel:
    """Owner of the policy's parameters: random values in memory that goes away with its last process.

    Args:
        layers: of Qwen3-0.6B's 28.
        seed: of the values.
    """

    def __init__(self, layers: int, seed: int = 0) -> None:
        *_, (_, shape, start) = _places(layers)
        size = align_up(start + prod(shape) * DTYPE.itemsize, mmap.PAGESIZE)
        self._fd = os.memfd_create("weightsync-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.handle = ModelHandle(f"/proc/{os.getpid()}/fd/{self._fd}", layers)
        random = np.random.Generator(np.random.SFC64(seed))
        for offset in range(0, size, _BLOCK_BYTES):
            words = min(_BLOCK_BYTES, size - offset) // 8
            block = random.integers(0, 1 << 64, words, dtype=np.uint64)
            os.pwrite(self._fd, (block & np.uint64(_BELOW_TWO)).data, offset)

    def close(self) -> None:
        """Give the memory back, once nobody has it mapped any more."""
        os.close(self._fd)


def _within(whole: torch.Tensor, layers: int, part: Part = WHOLE) -> Parameters:
    """Return the parameters that lie one after the other in a buffer."""
    return {
        name: whole[start : start + prod(shape) * DTYPE.itemsize].view(DTYPE).view(shape)
        for name, shape, start in _places(layers, part)
    }


def _places(layers: int, part: Part = WHOLE) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield each parameter's name, shape and first byte."""
    start = 0
    for name, shape in parameter_shapes(layers, part).items():
        yield name, shape, start
        start = align_up(start + prod(shape) * DTYPE.itemsize)
