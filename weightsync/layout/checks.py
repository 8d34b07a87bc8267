"""Checks that two numbers of a model and a parallel layout go together, with what to write instead."""

from __future__ import annotations

from weightsync.errors import ConfigurationError

_MAX_SHOWN = 8


def share(size: int, parts: int, what: str, option: str) -> int:
    """Return ``size / parts``.

    Args:
        size: to be distributed.
        parts: over how many ranks.
        what: names the size in the error, as the model's ``config.json`` does.
        option: names the option, as in ``--rollout tp``.

    Raises:
        ConfigurationError: it does not divide.
    """
    if size % parts:
        raise ConfigurationError(
            f"{what} {size} cannot be cut in {parts}; write {option}={_any_of(_divisors(size))}"
        )
    return size // parts


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]


def _any_of(numbers: list[int]) -> str:
    shown = [str(each) for each in numbers[:_MAX_SHOWN]]
    if len(shown) == 1:
        return shown[0]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}"
