"""What a sending rank keeps of a refit: every bucket in a buffer of its own, and all that it has said."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weightsync.control import Message
from weightsync.engines.slots import Slots
from weightsync.engines.transport import BucketTransport


@dataclass
class Shelf:
    """Buffers that are filled once in a refit, and the messages that name what is in them.

    Args:
        transport: makes more buffers where those that there are do not suffice.
    """

    transport: BucketTransport
    said: list[Message] = field(default_factory=list)
    """In order; whoever hears it, and nothing else, can fetch the rank's whole share."""
    is_written: bool = False
    """Whether a buffer has been opened, so that what it held before is lost."""

    def take(self, slots: Slots, buffers: list[torch.Tensor]) -> int:
        """Return a buffer that stays in use until the next refit; one is added to ``buffers`` if need be.

        Raises:
            TransportError: there is no memory for another one.
        """
        slot = slots.take()
        while slot is None:
            buffers.append(self.transport.extend())
            slots.add(len(buffers) - 1)
            slot = slots.take()
        slots.share(slot, 1)
        self.is_written = True
        return slot
