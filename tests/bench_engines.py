"""An engine that brings a wrong byte, for the benchmark to notice."""

from __future__ import annotations

from weightsync.engines.ipc import IPCCheckpointEngine


class FlippingCheckpointEngine(IPCCheckpointEngine):
    """Changes one value of what it has received."""

    async def receive_weight_batches(self):
        async for batch in super().receive_weight_batches():
            name, tensor = batch[0]
            changed = tensor.clone()
            changed.view(-1)[0] += 1
            yield [(name, changed), *batch[1:]]
