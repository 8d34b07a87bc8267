"""A worker's transfer buffers, and the transport that moves what is in them: made, kept, freed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from weightsync.engines.buffers import give_back
from weightsync.engines.calls import not_prepared
from weightsync.engines.intake import Intake
from weightsync.engines.parts import KeptParts
from weightsync.engines.transport import BucketTransport
from weightsync.errors import DeadlineError, TransportError

_log = logging.getLogger(__name__)


class TransferMemory:
    """Owns a transport and its buffers. Nothing is allocated before `allocate`.

    Args:
        make_transport: called once, at the first `allocate`.
        bucket_size: bytes of each buffer.
        poisons: overwrite memory that is given back, to show late readers.
    """

    def __init__(
        self, make_transport: Callable[[], BucketTransport], bucket_size: int, *, poisons: bool = False
    ) -> None:
        self._make_transport = make_transport
        self._bucket_size = bucket_size
        self._transport: BucketTransport | None = None
        self._stuck: Intake | None = None
        """One that could not be ended: its transfer may still write into the buffers."""
        self.buffers: list[torch.Tensor] = []
        self.parts = KeptParts(poisons=poisons)
        """For tensors that are larger than a bucket."""

    def allocate(self) -> BucketTransport:
        """Make the transport and its buffers, as far as they are not there; returns the transport."""
        self.require_sound()
        if self._transport is None:
            self._transport = self._make_transport()
        if not self.buffers:
            self.buffers = self._transport.allocate(self._bucket_size)
        return self._transport

    def require(self) -> BucketTransport:
        """Return the transport.

        Raises:
            LifecycleError: there are no buffers.
            TransportError: a transfer of an earlier refit may still write into them.
        """
        self.require_sound()
        if self._transport is None or not self.buffers:
            raise not_prepared()
        return self._transport

    def drain(self, receiver: Intake) -> None:
        """End a receiver; the buffers are not used again if that does not succeed.

        Raises:
            DeadlineError: its transfer does not end.
        """
        try:
            receiver.close()
        except DeadlineError:
            self._stuck = receiver
            raise

    def disconnect(self) -> None:
        """Forget the peer."""
        if self._transport is not None:
            self._transport.disconnect()

    def release(self) -> None:
        """Free the buffers, unless a transfer may still write into them."""
        if self._is_stuck:
            _log.warning("a transfer has not ended; its buffers are kept until it does")
            return
        self.parts.free()
        if self._transport is not None:
            self._transport.release()
        devices = {buffer.device for buffer in self.buffers}
        self.buffers = []
        for device in devices:
            give_back(device)

    def close_transport(self) -> None:
        """Let go of the transport, after `release`."""
        if self._transport is not None and not self._is_stuck:
            self._transport.close()

    @property
    def _is_stuck(self) -> bool:
        return self._stuck is not None and self._stuck.is_running

    def require_sound(self) -> None:
        """Check that no transfer of an earlier refit may still write into the buffers.

        Raises:
            TransportError: one may.
        """
        if self._stuck is not None:
            raise TransportError(
                "a transfer of an earlier refit could not be ended, and might write into the buffers of this "
                "one: close this engine, make and prepare a new one"
            )
