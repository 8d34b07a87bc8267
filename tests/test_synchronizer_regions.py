"""The driver's part of a refit by regions, over scripted workers: its steps, its checks, its report."""

from __future__ import annotations

import logging

import msgspec
import pytest

from tests.scripted_workers import (
    CallLog,
    ScriptedEngineHost,
    ScriptedPolicyWorker,
    figures,
    raising,
    sleeping,
)
from tests.test_synchronizer import LIFECYCLE, SEND, UPDATE
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import ConfigurationError, ManifestError, ProtocolError, RefitError
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer
from weightsync.tensors import TensorSpec, WeightManifest

NAMES = ("embed", "layer.0", "layer.1", "mtp.0")
MANIFEST = WeightManifest.build(TensorSpec(name, (4, 2), "bfloat16") for name in NAMES)
OTHER = WeightManifest.build(TensorSpec(name, (4, 3), "bfloat16") for name in NAMES)


def weights(manifest=MANIFEST, whole=(), rank=0):
    """What a policy rank says; the manifest comes from rank 0."""
    told = msgspec.msgpack.encode(manifest.tensors) if rank == 0 else b""
    return {"manifest": told, "digest": manifest.digest(), "whole": dict(whole)}


def layout(whole=(), unread=()):
    return {"whole": dict(whole), "unread": list(unread)}


class Job:
    """Two policy workers, a host of one rank and a host of two, and a synchronizer over them."""

    def __init__(self, shard_weights="auto", sizes=(1, 2), connected=True, topology="auto", **lifecycle):
        self.log = CallLog()
        self.policy = [self.policy_worker(rank) for rank in range(2)]
        self.hosts = [self.host(size, f"host {index}") for index, size in enumerate(sizes)]
        self.policy_group = LocalPolicyGroup(self.policy)
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            self.policy_group,
            LocalRolloutGroup(self.hosts),
            {
                "policy": {
                    "generation": {
                        "refit_transport": "nixl",
                        "refit_cfg": {
                            "nixl": {"device": "cpu", "topology": topology, "shard_weights": shard_weights}
                        },
                        "refit_lifecycle": LIFECYCLE | lifecycle,
                    }
                }
            },
            progress=False,
        )
        if connected:
            self.connect()

    def policy_worker(self, rank, manifest=MANIFEST):
        worker = ScriptedPolicyWorker(rank, log=self.log)
        worker.script["describe_weights"] = lambda kwargs: weights(manifest, rank=rank)
        return worker

    def host(self, size=1, name="newcomer"):
        host = ScriptedEngineHost(size, log=self.log, name=name)
        host.script["describe_layout"] = lambda kwargs: layout()
        return host

    def connect(self):
        self.synchronizer.init_communicator()

    def says(self, rank, **said):
        self.policy[rank].script["describe_weights"] = lambda kwargs: weights(rank=rank, **said)

    def stores(self, host, local_rank=None, **said):
        key = "describe_layout" if local_rank is None else ("describe_layout", local_rank)
        self.hosts[host].script[key] = lambda kwargs: layout(**said)

    def refused(self, kind):
        with pytest.raises(kind) as caught:
            self.connect()
        assert self.log.count("prepare_checkpoint_engine") == 0
        assert self.log.methods("host 0")[-1] == "close_checkpoint_engine"
        return str(caught.value)


# The steps.


@pytest.mark.parametrize("sharding", ["experts", "all", "auto"])
def test_shares_are_told_between_making_the_engines_and_preparing_them(sharding):
    job = Job(sharding)
    own = [method for method in job.log.methods("policy 1") if method != "assign_ranks"]
    assert own == [
        "checkpoint_engine_total_memory_bytes", "init_checkpoint_engine", "describe_weights",
        "prepare_checkpoint_engine", "init_checkpoint_engine_process_group",
    ]  # fmt: skip
    host = [method for method in job.log.methods("host 1") if method not in ("describe", "assign_ranks")]
    assert host[:4] == [
        "checkpoint_engine_total_memory_bytes", "init_checkpoint_engine", "describe_layout",
        "prepare_checkpoint_engine",
    ]  # fmt: skip
    everything = job.log.methods()
    assert everything.index("describe_layout") > max(
        index for index, method in enumerate(everything) if method == "describe_weights"
    )
    assert job.log.kwargs("policy 0", "describe_weights") == [{"sharding": sharding}]
    told = {"manifest": msgspec.msgpack.encode(MANIFEST.tensors), "sharding": sharding}
    assert job.log.kwargs("host 0", "describe_layout") == [told]


def test_without_regions_nobody_is_asked():
    job = Job("none")
    assert not {"describe_weights", "describe_layout"} & set(job.log.methods())
    assert job.synchronizer.sync_weights().topology.startswith("stripes: 2 policy to 3 rollout (auto")


def test_refits_that_work_ask_once():
    job = Job()
    for _ in range(3):
        job.synchronizer.sync_weights()
    assert job.log.count("describe_weights") == 2
    assert job.log.count("describe_layout") == 2


def test_a_failed_refit_connects_again_without_asking():
    job = Job()
    job.policy[0].script[SEND] = raising(ValueError("gather failed"))
    with pytest.raises(RefitError):
        job.synchronizer.sync_weights()
    del job.policy[0].script[SEND]
    job.synchronizer.sync_weights()
    assert job.log.count("prepare_checkpoint_engine") == 8
    assert job.log.count("describe_weights") == 2


def test_progress_shows_the_phase():
    phases = []

    class Listener:
        def begin(self, title): ...
        def update(self, phase, heard, awaited):
            phases.append(phase)

        def end(self): ...

    job = Job(connected=False)
    job.synchronizer._crew._listener = Listener().update
    job.connect()
    assert list(dict.fromkeys(phases)) == ["capacity", "init", "layout", "prepare", "connect", "status"]


def test_a_worker_that_does_not_answer_is_named_in_time():
    job = Job(connected=False, connect_s=0.3, silence_s=0.2)
    job.hosts[1].script["describe_layout"] = sleeping(2.0)
    with pytest.raises(RefitError, match=r"failed in phase layout at rollout rank 1: DeadlineError"):
        job.connect()


def test_what_a_worker_refuses_is_the_cause():
    job = Job("experts", connected=False)
    job.hosts[0].script["describe_layout"] = raising(ConfigurationError("its experts are shuffled"))
    with pytest.raises(RefitError, match="at rollout rank 0: ConfigurationError: its experts are"):
        job.connect()
    assert job.log.methods("host 1")[-1] == "close_checkpoint_engine"


# What is checked.


def test_policy_ranks_that_would_send_different_tensors_are_named():
    job = Job(connected=False)
    job.says(1, manifest=OTHER)
    message = job.refused(ManifestError)
    assert message.startswith("policy rank 1 would send other tensors than policy rank 0: names, shapes,")
    assert job.log.count("describe_layout") == 0


def test_a_tensor_that_nobody_stores_is_refused():
    job = Job(connected=False)
    job.stores(0, unread=["mtp.0", "layer.0"])
    job.stores(1, 0, unread=["mtp.0", "layer.1", "embed"])
    job.stores(1, 1, unread=["mtp.0", "layer.0"])
    message = job.refused(ManifestError)
    assert message.startswith(
        "no rollout rank has a place for 'mtp.0': the served model lacks them; name what"
    )
    assert "tensor 'mtp.0'" in message


@pytest.mark.parametrize("said", [{"allow_unused": ["mtp.*"]}, {}])
def test_what_may_come_unused_or_rides_whole_is_no_error(said):
    job = Job(connected=False, **said)
    for host in range(2):
        job.stores(host, unread=["mtp.0"], whole={} if said else {"mtp.0": "a transform"})
    job.connect()
    whole = job.synchronizer.sync_weights().whole
    assert whole == ({} if said else {"mtp.0": "a transform (rollout rank 0)"})


def test_all_means_all_and_says_what_cannot_be():
    job = Job("all", connected=False)
    job.says(1, whole={"embed": "the weight stream is a plain generator"})
    job.stores(1, 1, whole={name: f"{name} is shuffled" for name in NAMES})
    message = job.refused(ConfigurationError)
    assert message.startswith(
        "shard_weights: all, but 4 of 4 tensors cannot be moved by regions: 'embed': the weight stream is a "
        "plain generator (policy rank 1); 'layer.0': layer.0 is shuffled (rollout rank 2); "
    )
    assert "write shard_weights: auto, which sends these whole [policy rank 1, phase layout]" in message


def test_a_long_list_is_cut():
    specs = [TensorSpec(f"t{index}", (1,), "float32") for index in range(9)]
    job = Job("all", connected=False)
    for rank in range(2):
        job.says(rank, manifest=WeightManifest.build(specs), whole={spec.name: "why" for spec in specs})
    message = job.refused(ConfigurationError)
    assert "'t0', 't1', 't2', 't3', 't4': why (policy rank 0); and 4 more; write" in message
    assert "'t5'" not in message


@pytest.mark.parametrize("sharding", ["auto", "experts"])
def test_what_cannot_be_moved_rides_whole_and_is_told(sharding, caplog):
    job = Job(sharding, connected=False)
    job.stores(1, 0, whole={"layer.1": "its kernel repacks it"})
    job.says(0, whole={"layer.0": "rank 0 pads it"})
    job.says(1, whole={"layer.0": "rank 1 pads it", "layer.1": "cut in strips"})
    with caplog.at_level(logging.INFO):
        job.connect()
    told = "'layer.0': rank 0 pads it (policy rank 0); 'layer.1': cut in strips (policy rank 1)"
    assert f"shard_weights: {sharding}: 2 of 4 tensors take the full path: {told}" in caplog.messages
    report = job.synchronizer.sync_weights()
    assert list(report.whole) == ["layer.0", "layer.1"]
    prefix = f"regions (shard_weights: {sharding}) + stripes: 2 policy to 3 rollout (auto: "
    assert report.topology.startswith(prefix)


@pytest.mark.parametrize(
    ("who", "value"),
    [
        ("policy", None),
        ("policy", {"digest": MANIFEST.digest(), "whole": {}}),
        ("policy", weights() | {"manifest": b"\x81"}),
        ("policy", weights() | {"whole": {"unknown": "x"}}),
        ("rollout", layout() | {"unread": "embed"}),
        ("rollout", layout(unread=["unknown"])),
        ("rollout", {"unread": []}),
    ],
)
def test_a_malformed_answer_is_refused(who, value):
    job = Job(connected=False)
    worker = job.policy[0] if who == "policy" else job.hosts[0]
    worker.script["describe_weights" if who == "policy" else "describe_layout"] = lambda kwargs: value
    message = job.refused(ProtocolError)
    assert message.startswith("malformed ")
    assert f"[{who} rank 0, phase layout]" in message


# Afterwards.


def test_the_report_counts_copies_and_names_the_way():
    job = Job("all")
    said = figures(receive=0.1, total=0.2) | {"copies": {"in_place": 2000, "staged": 900, "whole": 100}}
    for host in job.hosts:
        host.script[UPDATE] = lambda kwargs: said
    report = job.synchronizer.sync_weights()
    assert report.topology == "regions (shard_weights: all)"
    assert report.copies == {"in_place": 6000, "staged": 2700, "whole": 300}
    assert report.bytes_by_rank == {0: 3000, 1: 3000, 2: 3000}
    assert "; by regions: 6000 bytes in place, 2700 bytes staged, 300 bytes whole, 3000 bytes a rank" in str(
        report
    )


def test_a_model_that_has_changed_is_told_what_helps():
    job = Job()
    changed = ManifestError("this rank's layout was made for other tensors: call init_communicator again")
    job.policy[1].script[SEND] = raising(changed)
    with pytest.raises(RefitError) as caught:
        job.synchronizer.sync_weights()
    message = str(caught.value)
    assert "at policy rank 1: ManifestError: this rank's layout was made for other tensors" in message
    assert "What to do: call shutdown() and init_communicator(), then sync_weights again" in message
    del job.policy[1].script[SEND]
    job.says(0, manifest=OTHER)
    job.says(1, manifest=OTHER)
    job.synchronizer.shutdown()
    job.log.clear()
    job.connect()
    told = job.log.kwargs("host 1", "describe_layout")[0]["manifest"]
    assert told == msgspec.msgpack.encode(OTHER.tensors)
    job.synchronizer.sync_weights()


# Workers that come and go.


def test_a_newcomer_alone_is_asked_and_given_the_manifest_that_is_known():
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()
    new = job.host()
    new.script["describe_layout"] = lambda kwargs: layout(whole={"embed": "padded"})
    for host in job.hosts:
        host.script["update_checkpoint_engine_process_group"] = lambda kwargs: None
    report = job.synchronizer.add_rollout(new)
    assert job.log.count("describe_weights") == 0
    assert job.log.count("describe_layout") == job.log.count("describe_layout", "newcomer") == 1
    assert job.log.kwargs("newcomer", "describe_layout")[0]["manifest"].startswith(b"\x94")
    methods = job.log.methods("newcomer")
    assert methods.index("init_checkpoint_engine") < methods.index("describe_layout")
    assert methods.index("describe_layout") < methods.index("prepare_checkpoint_engine")
    assert report.whole == {"embed": "padded (rollout rank 3)"}
    assert report.topology.startswith("regions (shard_weights: auto) + ")
    new.script["update_checkpoint_engine_process_group"] = lambda kwargs: None
    job.synchronizer.remove_rollout(0)
    job.synchronizer.mark_stale()
    assert job.synchronizer.sync_weights().whole == {"embed": "padded (rollout rank 2)"}
    job.synchronizer.remove_rollout(2)
    assert job.synchronizer.sync_weights().whole == {}


def test_a_newcomer_that_needs_whole_tensors_where_all_are_moved_stays_out():
    job = Job("all")
    job.synchronizer.sync_weights()
    new = job.host()
    new.script["describe_layout"] = lambda kwargs: layout(whole={"embed": "padded"})
    with pytest.raises(
        ConfigurationError, match="1 of 4 tensors cannot be moved by regions: 'embed': padded"
    ):
        job.synchronizer.add_rollout(new)
    job.log.clear()
    assert job.synchronizer.sync_weights().topology == "regions (shard_weights: all)"
    assert job.log.count("describe_layout") == 2  # all of them connect anew
    assert "newcomer" not in {who for who, _, _ in job.log.entries}


@pytest.mark.parametrize("manifest", [MANIFEST, OTHER])
def test_a_policy_worker_in_the_place_of_another_must_send_the_same(manifest):
    job = Job()
    job.synchronizer.sync_weights()
    for host in job.hosts:
        host.script["update_checkpoint_engine_process_group"] = lambda kwargs: None
    job.log.clear()
    new = job.policy_worker(1, manifest)
    if manifest is MANIFEST:
        job.synchronizer.replace_policy(1, new)
        assert job.log.count("describe_weights") == 1
        assert job.log.count("describe_layout") == 0
        job.synchronizer.sync_weights()
        return
    with pytest.raises(ManifestError, match="policy rank 1 would send other tensors than the others were"):
        job.synchronizer.replace_policy(1, new)
    with pytest.raises(RefitError, match="phase layout at policy rank 1: ManifestError: policy rank 1 would"):
        job.synchronizer.sync_weights()
