"""The control channel between two workers: authenticated, typed, deadline-bound.

A worker makes one `ControlHub` and hands its `card` to its peers through the driver. Of two peers one
calls `accept`, the other `connect`; each gets a `Link` to the other, and opens one refit after another on
it. Bytes of weights travel elsewhere, except for transports that have no other way.
"""

from weightsync.control.addresses import default_host
from weightsync.control.deadlines import Deadlines
from weightsync.control.guests import GuestLink
from weightsync.control.hub import MAX_FRAME_BYTES, ControlHub
from weightsync.control.link import Link
from weightsync.control.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bucket,
    Bye,
    ChunkEntry,
    Complete,
    Digests,
    Done,
    Exposed,
    Gate,
    Go,
    Heartbeat,
    Hello,
    Loaded,
    Manifest,
    Message,
    Packed,
    Ready,
    Release,
    Taken,
    Welcome,
)
from weightsync.control.watch import Watch

__all__ = [
    "Abort",
    "Bucket",
    "Bye",
    "ChunkEntry",
    "Complete",
    "ControlHub",
    "Deadlines",
    "Digests",
    "Done",
    "Exposed",
    "Gate",
    "Go",
    "GuestLink",
    "Heartbeat",
    "Hello",
    "Link",
    "Loaded",
    "MAX_FRAME_BYTES",
    "Manifest",
    "Message",
    "PROTOCOL_VERSION",
    "Packed",
    "Ready",
    "Release",
    "Taken",
    "Watch",
    "Welcome",
    "default_host",
]
