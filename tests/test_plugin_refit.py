"""A plugin written from the design document, selected by its class path, in the whole refit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import RefitError
from weightsync.policy import PolicyCheckpointEngineMixin
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

PLUGIN = "tests.plugin_example:MyCheckpointEngine"
CONFIG = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "refit_transport": PLUGIN,
            "refit_cfg": {PLUGIN: {"update_weights_bucket_memory_ratio": 0.001, "transport": "custom"}},
        }
    }
}


class Trainer(PolicyCheckpointEngineMixin):
    """Sends a plain generator, as the document's iterators are; may leave out a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rank = 0
        self.model = model
        self.left_out = ""

    def weight_stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in self.model.state_dict().items() if name != self.left_out)


def test_a_plugin_refits_and_what_it_leaves_out_is_noticed() -> None:
    torch.manual_seed(0)
    trained, served = torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)
    trainer, worker = Trainer(trained), ModuleRolloutWorker(served)
    groups = LocalPolicyGroup([trainer]), LocalRolloutGroup([worker])
    with CheckpointEngineWeightSynchronizer(*groups, CONFIG, progress=False) as synchronizer:
        synchronizer.init_communicator()
        for version in (1, 2):
            with torch.no_grad():
                trained.weight.add_(version)
            report = synchronizer.sync_weights(version)
            assert torch.equal(served.weight, trained.weight)
            assert (report.tensors, report.bytes) == (2, 4 * (30 * 40 + 40))

        trainer.left_out = "bias"
        with pytest.raises(RefitError, match="bias") as caught:
            synchronizer.sync_weights(3)
        assert caught.value.serving[0] is None, "half an update must not be served"

        trainer.left_out = ""
        synchronizer.sync_weights(4)
        assert synchronizer.weight_version == 4
