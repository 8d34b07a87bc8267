"""Which dtype a weight is sent in, decided by its name. The sender casts; the receiver never does."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from weightsync.errors import ConfigurationError

KEEP = "keep"

ALWAYS_KEPT = ("*e_score_correction_bias", "*.expert_bias")
"""Weights that are wrong in a narrower dtype: fp32 router biases differ in digits that bfloat16 has not."""

_CASTABLE = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
}


class DtypePolicy:
    """Decides the dtype that each weight is sent in.

    For a floating tensor of 16, 32 or 64 bits the first of these that speaks wins: ``kept``, ``overrides`` in
    their order, ``default``. All others (integers, booleans, fp8, complex) are sent as they are stored.

    Args:
        default: a dtype or its name (``"bfloat16"``, ``"bf16"``, ...); `None` sends weights as stored.
        overrides: ``{pattern: dtype or "keep"}``; `fnmatch` patterns over Hugging Face names, case-sensitive,
            matched before any ``rename`` of the weight source.
        kept: patterns of weights that are always sent as stored; ``()`` gives up that protection.

    Raises:
        ConfigurationError: a dtype that weights are not cast to.
    """

    def __init__(
        self,
        default: torch.dtype | str | None = None,
        overrides: Mapping[str, torch.dtype | str] | None = None,
        *,
        kept: tuple[str, ...] = ALWAYS_KEPT,
    ) -> None:
        self._default = None if default is None else _castable(default)
        rules = [(pattern, _rule(value)) for pattern, value in (overrides or {}).items()]
        self._rules: list[tuple[str, torch.dtype | None]] = [*((pattern, None) for pattern in kept), *rules]

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the weight ``name``, stored as ``dtype``, is sent."""
        if dtype not in _CASTABLE.values():
            return dtype
        for pattern, target in self._rules:
            if fnmatchcase(name, pattern):
                return target or dtype
        return self._default or dtype

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the dtype it is sent in: itself where nothing changes."""
        return tensor.to(self.dtype_of(name, tensor.dtype))

    def __repr__(self) -> str:
        return f"DtypePolicy(default={self._default}, rules={self._rules})"


def _rule(value: torch.dtype | str) -> torch.dtype | None:
    return None if value == KEEP else _castable(value)


def _castable(value: torch.dtype | str) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    if name not in _CASTABLE:
        raise ConfigurationError(
            f"weights are not cast to {value!r}; write bfloat16, float16, float32 or float64, "
            "or 'keep' for a pattern"
        )
    return _CASTABLE[name]
