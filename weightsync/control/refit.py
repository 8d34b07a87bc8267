"""The state of one link during one begin and one refit. Plain data; `link.Link` guards it by its lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from weightsync.control.messages import NONCE_BYTES, Heartbeat, Message
from weightsync.control.wires import Wire
from weightsync.errors import WeightSyncError

MakeError = Callable[[], WeightSyncError]
"""Errors are made anew for each wait that raises them: threads must not share a traceback."""


@dataclass(eq=False)
class Attempt:
    """One call of ``begin`` that waits for the handshake."""

    epoch: int | None
    version: int | None
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    refit: Refit | None = None
    failure: MakeError | None = None
    heard: str = ""
    """What else was heard meanwhile, for the deadline's text."""
    started: bool = False
    """Whether the I/O thread has taken it up; until then what arrives belongs to the time before."""
    next_due: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether the wait is over."""
        return self.refit is not None or self.failure is not None


@dataclass(eq=False)
class Refit:
    """An open refit. Times are monotonic seconds."""

    epoch: int
    version: int | None
    token: bytes
    wire: Wire
    connection: bytes
    opened_at: float
    heard_at: float
    inbox: deque[tuple[Message, int]] = field(default_factory=deque)
    """What nobody has taken yet, each with the bytes of its frame."""
    inbox_bytes: int = 0
    failure: MakeError | None = None
    aborted: bool = False
    """The failure is one that the peer told."""
    ended: str | None = None
    """Why the peer left in good order."""
    peer_closed: bool = False
    """It has closed its end of the link, too: nothing that this side still does can matter to it."""
    closing: str | None = None
    """Why this side leaves."""
    last_message: str = "handshake"
    last_message_at: float = 0.0
    last_beat: str = ""
    doing: str = ""
    """What this side sent last; its heartbeats say so."""
    frames_in: int = 0
    frames_out: int = 0
    next_beat: float = 0.0
    lost_at: float | None = None
    """When a closed connection counts as a lost peer, unless the peer said good-bye by then."""
    probe_until: float = 0.0

    def hear(self, message: Message, now: float) -> None:
        """Note a sign of life."""
        self.heard_at = now
        if isinstance(message, Heartbeat):
            self.last_beat = message.progress
        else:
            self.last_message, self.last_message_at = message.describe(), now

    def last_heard(self, now: float) -> str:
        """Say what came last, and how long ago: ``bucket 3, 0.4 s ago``."""
        text = f"{self.last_message}, {now - self.last_message_at:.1f} s ago"
        if self.heard_at > self.last_message_at:
            doing = f", at {self.last_beat!r}" if self.last_beat else ""
            text += f"; heartbeat {now - self.heard_at:.1f} s ago{doing}"
        return text
