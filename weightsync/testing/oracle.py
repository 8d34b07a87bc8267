"""What must have come: a stream's bytes, made without an engine, and the comparison with what came."""

from __future__ import annotations

from functools import lru_cache

import torch

from weightsync.testing.streams import make_stream

POISON = 0xA5
"""What a destination is filled with before it is written."""

_SHOWN = 5


class ConformanceError(AssertionError):
    """An engine does not do what its contract says."""


def check(condition: object, message: str) -> None:
    """Fail the test where a condition does not hold: an `assert` that optimised Python keeps.

    Raises:
        ConformanceError: it does not hold.
    """
    if not condition:
        raise ConformanceError(message)


def loaded_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Load a tensor as a model does, into a poisoned destination; returns that as flat uint8."""
    plain = tensor.detach()
    nbytes = plain.numel() * plain.element_size()
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    target = torch.full((nbytes,), POISON, dtype=torch.uint8).view(plain.dtype).view(plain.shape)
    target.copy_(plain)
    return target.view(-1).view(torch.uint8)


class Expected:
    """What one receiver of a stream must have got when it ends; records what it gets.

    Args:
        kind: the stream's name, see `weightsync.testing.streams`.
        bucket_size: bytes.
        seed: of the stream.
    """

    def __init__(self, kind: str, bucket_size: int, seed: int) -> None:
        self._expected = _reference(kind, bucket_size, seed)
        self._received: set[str] = set()
        self.complaints: list[str] = []
        self.nbytes = 0

    @property
    def fraction(self) -> float:
        """The share of the stream's tensors that has come, 0 to 1."""
        return len(self._received) / len(self._expected) if self._expected else 1.0

    def record(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        """Compare a batch, and note what is wrong with it."""
        for name, tensor in batch:
            if name in self._received:
                self.complaints.append(f"{_short(name)} came twice")
            self._received.add(name)
            self.nbytes += tensor.numel() * tensor.element_size()
        self.compare(batch, "")

    def compare(self, batch: list[tuple[str, torch.Tensor]], when: str) -> None:
        """Compare a batch's values; ``when`` ends each complaint."""
        self.complaints += [
            f"{_short(name)} {complaint}{when}"
            for name, tensor in batch
            if (complaint := self._complaint(name, tensor))
        ]

    def require_complete(self) -> None:
        """Check that everything came, and right.

        Raises:
            ConformanceError: it did not.
        """
        missing = [f"{_short(name)} did not come" for name in self._expected if name not in self._received]
        self.require_right(missing)

    def require_right(self, missing: list[str] | None = None) -> None:
        """Check that what has come so far was right.

        Raises:
            ConformanceError: it was not.
        """
        complaints = [*self.complaints, *(missing or [])]
        more = f" and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
        check(not complaints, "; ".join(complaints[:_SHOWN]) + more)

    def _complaint(self, name: str, tensor: torch.Tensor) -> str:
        if name not in self._expected:
            return "was not sent"
        dtype, shape, data = self._expected[name]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            return f"came as {tensor.dtype} {list(tensor.shape)}, was sent as {dtype} {list(shape)}"
        got = loaded_bytes(tensor)
        if torch.equal(got, data):
            return ""
        wrong = (got != data).nonzero().flatten()
        return f"has {len(wrong)} wrong bytes of {len(data)}, the first at {int(wrong[0])}"


@lru_cache(maxsize=4)
def _reference(
    kind: str, bucket_size: int, seed: int
) -> dict[str, tuple[torch.dtype, torch.Size, torch.Tensor]]:
    return {
        name: (tensor.dtype, tensor.shape, loaded_bytes(tensor))
        for name, tensor in make_stream(kind, bucket_size, seed)
    }


def _short(name: str) -> str:
    return repr(name if len(name) < 80 else f"{name[:80]}...")
