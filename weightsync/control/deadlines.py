"""How long the control channel waits for what."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from weightsync.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds, all above zero.

    Raises:
        ConfigurationError: a value is not a positive number.
    """

    connect_s: float = 60
    """For the handshake at the begin of a refit."""
    stall_s: float = 300
    """Between two messages of the peer; its heartbeats do not count."""
    total_s: float = 3600
    """For one refit, from the handshake on."""
    silence_s: float = 15
    """Without any sign of life, heartbeats included, before the peer counts as lost."""
    heartbeat_s: float = 1.0
    """Between two heartbeats."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ConfigurationError(
                    f"deadline {name} must be a number of seconds above 0, got {value!r}"
                )

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats in practice: at least four within the silence that a peer tolerates."""
        return min(self.heartbeat_s, self.silence_s / 4)
