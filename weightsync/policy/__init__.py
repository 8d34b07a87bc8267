"""The sending side: the policy worker's mixins and the weight sources."""

from weightsync.policy.colocated import AsyncColocatedWorkerMixin, ColocatedWorkerMixin
from weightsync.policy.dtypes import DtypePolicy
from weightsync.policy.fsdp import fsdp_weights
from weightsync.policy.module import module_weights
from weightsync.policy.source import state_source as weight_stream_from
from weightsync.policy.worker import (
    AsyncPolicyCheckpointEngineMixin,
    PolicyCheckpointEngineMixin,
    preinit_checkpoint_engine,
)

__all__ = [
    "AsyncColocatedWorkerMixin",
    "AsyncPolicyCheckpointEngineMixin",
    "ColocatedWorkerMixin",
    "DtypePolicy",
    "PolicyCheckpointEngineMixin",
    "fsdp_weights",
    "module_weights",
    "preinit_checkpoint_engine",
    "weight_stream_from",
]
