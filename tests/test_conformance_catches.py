"""The conformance suite fails where it should: an honest engine passes it, broken ones each fail a test.

The engines hand tensors over within a process, from policy rank 0 to every rollout rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from weightsync.engines.base import CheckpointEngine
from weightsync.engines.nixl import NIXLCheckpointEngine
from weightsync.errors import (
    DeadlineError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    WeightSyncError,
)

ROOT = Path(__file__).parent.parent
END = object()
_SESSIONS = {}


class Refit:
    """What all ranks of one refit share: a queue for each receiver, and the first error."""

    def __init__(self):
        self.changed = threading.Condition()
        self.queues = {}
        self.arrived = 0
        self.error = None

    def fail(self, error):
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, ready, seconds, what):
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.error, seconds)
            if self.error is not None and not ready():
                raise PeerAbortedError(f"{type(self.error).__name__}: {self.error}")
            if not ready():
                raise DeadlineError(f"waited {seconds} s {what}")

    def put(self, rank, item, seconds):
        queue = self.queues.setdefault(rank, [])
        self.wait(lambda: len(queue) < 2 and not self.error, seconds, f"for rollout rank {rank}")
        with self.changed:
            queue.append(item)
            self.changed.notify_all()

    def get(self, rank, seconds):
        queue = self.queues.setdefault(rank, [])
        self.wait(lambda: queue, seconds, "for policy rank 0")
        with self.changed:
            self.changed.notify_all()
            return queue.pop(0)

    def arrive(self, parties, seconds):
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()
        self.wait(lambda: self.arrived >= parties, seconds, "for the others' end")


class Honest(CheckpointEngine):
    """Does all that is asked of an engine within a process."""

    lacks = dict.fromkeys(("processes", "hosts", "latecomers"), "it lives in one process")
    stall_s = 6.0

    def __init__(self, bucket_size):
        self.bucket_size = bucket_size
        self.session = self.refit = self.mine = None
        self.busy = threading.Lock()

    def prepare(self):
        self.session, self.mine = None, uuid.uuid4().hex
        return {"session": self.mine}

    def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata):
        self.rank, self.receivers = worker_rank, range(rollout_world_size if worker_rank == 0 else 0)
        self.parties = train_world_size + rollout_world_size
        self.session = _SESSIONS.setdefault(metadata[0]["session"], {})

    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata):
        self.rank, self.parties = rollout_rank, train_world_size + rollout_world_size
        self.session = _SESSIONS.setdefault(metadata[0]["session"], {})

    def open_refit(self, *, epoch, version):
        self.refit = self.session.setdefault(epoch, Refit())

    def begin(self):
        if self.session is None or self.refit is None:
            raise LifecycleError("join and open the refit first")
        if not self.busy.acquire(blocking=False):
            raise LifecycleError("a refit is running")
        return self.refit

    async def send_weights(self, weights):
        refit = self.begin()
        try:
            self.send(refit, weights)
            refit.arrive(self.parties, self.stall_s)
        except BaseException as error:
            refit.fail(error)
            raise
        finally:
            self.busy.release()

    def send(self, refit, weights):
        self.put(refit, getattr(weights, "manifest", None))
        batch, names, nbytes = [], set(), 0
        for name, tensor in weights:
            if self.repeated(name, names):
                raise ManifestError(f"{name} comes twice")
            names.add(name)
            if nbytes + tensor.nbytes > self.bucket_size:
                self.put(refit, batch)
                batch, nbytes = [], 0
            batch += self.pack(name, tensor)
            nbytes += tensor.nbytes
        self.put(refit, batch)
        self.put(refit, END)

    def put(self, refit, item):
        for rank in self.receivers:
            refit.put(rank, item, self.stall_s)

    def repeated(self, name, names):
        return name in names

    def pack(self, name, tensor):
        return [(name, tensor.detach().clone().contiguous().resolve_conj().resolve_neg())]

    async def receive_weight_batches(self):
        refit = self.begin()
        try:
            manifest = refit.get(self.rank, self.stall_s)
            if manifest is not None and self.manifest_check is not None:
                self.manifest_check(manifest)
            while (batch := refit.get(self.rank, self.stall_s)) is not END:
                yield self.unpack(batch)
            refit.arrive(self.parties, self.stall_s)
        except GeneratorExit:
            refit.fail(IncompleteStreamError("the consumer stopped"))
            raise
        except BaseException as error:
            refit.fail(error)
            raise
        finally:
            self.busy.release()

    def unpack(self, batch):
        return batch

    def abort_refit(self, error):
        if self.refit is not None:
            self.refit.fail(error)

    def finalize(self):
        self.refit = None

    def close(self):
        self.abort_refit(LifecycleError("closed"))
        self.finalize()


# Broken ones, and the test that must fail for each.

BROKEN: dict[str, tuple[str, str]] = {}
"""Class name: the test, and a part of its message."""


def fails(test, message):
    def note(cls):
        BROKEN[cls.__name__] = (test, message)
        return cls

    return note


@fails("test_every_byte_comes[plain]", "'layers.3.weight' did not come")
class Drops(Honest):
    def pack(self, name, tensor):
        return [] if name == "layers.3.weight" else super().pack(name, tensor)


@fails("test_every_byte_comes[plain]", "'layers.5.weight' came twice")
class Doubles(Honest):
    def pack(self, name, tensor):
        return super().pack(name, tensor) * (2 if name == "layers.5.weight" else 1)


@fails("test_every_byte_comes[plain]", "has 1 wrong bytes of 262144, the first at 1234")
class FlipsAByte(Honest):
    def pack(self, name, tensor):
        ((_, packed),) = super().pack(name, tensor)
        if packed.nbytes > 200_000:
            packed.view(-1).view(torch.uint8)[1234] ^= 1
        return [(name, packed)]


@fails("test_every_byte_comes[conjugated and negated]", "'conjugated' has")
class ForgetsConjugation(Honest):
    def pack(self, name, tensor):
        return super().pack(name, tensor.conj() if tensor.is_conj() else tensor)


@fails("test_every_byte_comes[layouts]", "wrong bytes")
class ReadsStorageInOrder(Honest):
    def pack(self, name, tensor):
        size = (tensor.numel(),)
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            return super().pack(name, tensor)
        return [(name, tensor.detach().as_strided(size, (1,), 0).clone().view(tensor.shape))]


@fails("test_every_byte_comes[scalars and empty ones]", "'no rows' did not come")
class ForgetsEmptyTensors(Honest):
    def pack(self, name, tensor):
        return super().pack(name, tensor) if tensor.numel() else []


@fails("test_every_byte_comes[scalars and empty ones]", "'scalar' came as torch.float32 [1]")
class MakesScalarsVectors(Honest):
    def pack(self, name, tensor):
        return super().pack(name, tensor if tensor.dim() else tensor.view(1))


@fails("test_every_byte_comes[all dtypes]", "came as torch.float32")
class SendsHalfPrecisionAsFloat(Honest):
    def pack(self, name, tensor):
        return super().pack(name, tensor.float() if tensor.dtype is torch.float16 else tensor)


@fails("test_every_byte_comes[around the bucket]", "wrong bytes")
class CutsAtTheBucket(Honest):
    def pack(self, name, tensor):
        ((_, packed),) = super().pack(name, tensor)
        if packed.nbytes > self.bucket_size:
            packed.view(-1)[self.bucket_size :] = 0
        return [(name, packed)]


@fails("test_every_byte_comes[odd names]", "was not sent")
class StripsNames(Honest):
    def pack(self, name, tensor):
        return super().pack(name.strip() or "blank", tensor)


@fails("test_names_shapes_and_values_change_from_refit_to_refit", "wrong bytes")
class RemembersValues(Honest):
    def __init__(self, bucket_size):
        super().__init__(bucket_size)
        self.known = {}

    def pack(self, name, tensor):
        return [self.known.setdefault((name, tensor.shape, tensor.dtype), super().pack(name, tensor)[0])]


@fails("test_a_batch_is_valid_until_the_next_one_is_asked_for", "while it was still in use")
class OverwritesWhatIsInUse(Honest):
    def unpack(self, batch):
        for _, tensor in batch:
            if tensor.numel():
                threading.Timer(0.01, tensor.zero_).start()
        return batch


@fails("test_all_ranks_in_step[3 to 1]", "not all 3 policy ranks took the stream's next step")
class DoesNotDrain(Honest):
    def send(self, refit, weights):
        if self.receivers:
            super().send(refit, weights)


@fails("test_all_ranks_in_step[1 to 1]", "that it was given item by item")
class Collects(Honest):
    def send(self, refit, weights):
        super().send(refit, iter(list(weights)))


@fails("test_all_ranks_in_step[2 to 4]", "did not come")
class ServesTheFirstReceiversAlone(Honest):
    def put(self, refit, item):
        for rank in self.receivers:
            refit.put(rank, item if rank < 2 or item is END or item is None else [], self.stall_s)


@fails("test_all_ranks_in_step[1 to 3]", "joined, though its engine refuses that")
class RefusesAndJoins(Honest):
    def refuses(self, *, train_world_size, rollout_world_size):
        return "too many" if rollout_world_size > train_world_size else None


@fails("test_one_of_a_pair_raises[policy-middle]", "returned before its stream was at its end")
class SwallowsTheStreamsError(Honest):
    def send(self, refit, weights):
        def until_it_breaks():
            try:
                yield from weights
            except ValueError:
                return

        super().send(refit, until_it_breaks())


@fails("test_one_of_a_pair_raises[rollout-last]", "policy rank 0 ended well")
class DoesNotWaitForReceivers(Honest):
    async def send_weights(self, weights):
        refit = self.begin()
        try:
            self.send(refit, weights)
            refit.arrive(0, self.stall_s)
        finally:
            self.busy.release()


@fails("test_one_of_a_pair_raises[policy-first]", "refit of rollout rank 0 did not end within")
class TellsNobody(Honest):
    stall_s = 60.0

    async def send_weights(self, weights):
        refit = self.begin()
        try:
            self.send(refit, weights)
            refit.arrive(self.parties, self.stall_s)
        finally:
            self.busy.release()

    def abort_refit(self, error):
        pass


@fails("test_one_of_a_pair_raises[rollout-first]", "that is no WeightSyncError")
class RaisesWhatItLikes(Honest):
    async def send_weights(self, weights):
        try:
            await super().send_weights(weights)
        except WeightSyncError as error:
            raise RuntimeError(str(error)) from error


@fails("test_one_of_several_raises[(2, 2)-policy-1]", "nobody heard")
class BystandersKeepSilent(Honest):
    async def send_weights(self, weights):
        if self.receivers:
            await super().send_weights(weights)
        else:
            self.refit.arrive(0, 0)
            self.receivers = list(weights)[:0]

    def abort_refit(self, error):
        if getattr(self, "receivers", True):
            super().abort_refit(error)


@fails("test_a_receiver_stops_asking[middle]", "though the refit failed")
class TakesABreakForTheEnd(Honest):
    async def receive_weight_batches(self):
        refit = self.begin()
        try:
            refit.get(self.rank, self.stall_s)
            while (batch := refit.get(self.rank, self.stall_s)) is not END:
                yield batch
        except GeneratorExit:
            while refit.get(self.rank, self.stall_s) is not END:
                pass
        finally:
            refit.arrive(0, self.stall_s)
            self.busy.release()


@fails("test_a_name_that_comes_twice", "though the refit failed")
class TakesRepeatedNames(Honest):
    def repeated(self, name, names):
        return False

    def pack(self, name, tensor):
        self.packed = getattr(self, "packed", {})
        self.packed[name] = self.packed.get(name, 0) + 1
        return super().pack(name, tensor) if self.packed[name] == 1 else []


@fails("test_a_second_refit_while_one_runs[policy]", "a second refit while one ran")
class RunsTwoAtOnce(Honest):
    def begin(self):
        self.busy = threading.Lock()
        return super().begin()


@fails("test_a_refit_before_init[policy]", "no WeightSyncError")
class AssumesItHasJoined(Honest):
    def begin(self):
        if self.refit is None:
            raise AttributeError("no refit")
        return super().begin()


@fails("test_closed_during_a_refit[policy]", "though policy rank 0 was closed in the middle")
class ClosesAfterTheRefit(Honest):
    def close(self):
        with self.busy:
            self.finalize()


@fails("test_ending_twice_is_harmless", "closed already")
class ClosesOnce(Honest):
    closed = False

    def close(self):
        if self.closed:
            raise LifecycleError("closed already")
        self.closed = True
        super().close()


@fails("test_thirty_refits_leave_nothing_behind", "30 more descriptors")
class LeaksDescriptors(Honest):
    async def send_weights(self, weights):
        await super().send_weights(weights)
        os.dup(0)


@fails("test_thirty_refits_leave_nothing_behind", "MiB more memory")
class LeaksMemory(Honest):
    def unpack(self, batch):
        self.kept = [*getattr(self, "kept", []), *batch]
        return batch


@fails("test_declarations", "lacks 'speed', which is none of")
class LacksSomethingElse(Honest):
    lacks = Honest.lacks | {"speed": "no"}


@fails("test_declarations", "lacks 'checks' without a reason")
class LacksWithoutAReason(Honest):
    lacks = Honest.lacks | {"checks": ""}


@fails("test_metadata_are_plain_data", "prepare()['session'] is a UUID, no plain data")
class HasMetadataThatDoNotTravel(Honest):
    def prepare(self):
        return {"session": uuid.uuid4()}


@fails("test_a_manifest_check_comes_first_and_may_refuse", "called 2 times")
class AsksTwice(Honest):
    async def receive_weight_batches(self):
        check = self.manifest_check
        self.manifest_check = check and (lambda manifest: (check(manifest), check(manifest)))
        async for batch in super().receive_weight_batches():
            yield batch


@fails("test_one_of_several_processes_is_lost[SIGSTOP of rollout 0, middle]", "did not end within")
class WaitsForTheDead(NIXLCheckpointEngine):
    """Its peer's silence means nothing to it."""

    def __init__(self, bucket_size, **settings):
        patient = {"silence_s": 600.0, "stall_s": 600.0, "connect_s": 600.0}
        super().__init__(bucket_size, device="cpu", bind_host="127.0.0.1", **{**settings, **patient})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each test that was run: ``(class, test) -> message``, empty where it passed, `None` where skipped."""
    folder = tmp_path_factory.mktemp("conformance")
    lines = ["from weightsync.testing import EngineConformance", ""]
    chosen = ["test_broken.py::TestHonest"]
    for name, test in [("Honest", ""), *((name, test) for name, (test, _) in BROKEN.items())]:
        bound = 20 if name == "Honest" else 4
        lines += [
            f"class Test{name}(EngineConformance):",
            f"    engine = '{__name__}:{name}'",
            f"    bound_s, step_s = {bound}, 2",
            "",
        ]
        chosen += [f"test_broken.py::Test{name}::{test}"] if test else []
    (folder / "test_broken.py").write_text("\n".join(lines))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml"]
    ended = subprocess.run(
        [*command, *chosen], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=200, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout[-4000:] + ended.stderr[-2000:]
    cases = ElementTree.parse(folder / "out.xml").iter("testcase")
    return {(case.get("classname").rpartition(".")[2], case.get("name")): message_of(case) for case in cases}


def message_of(case):
    if case.find("skipped") is not None:
        return None
    failed = [case.find("failure"), case.find("error")]
    return " ".join(f"{each.get('message')}\n{each.text}" for each in failed if each is not None)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_honest_engine_passes_all_of_it(results):
    honest = {test: message for (cls, test), message in results.items() if cls == "TestHonest"}
    assert {test: message for test, message in honest.items() if message} == {}
    skipped = {test.partition("[")[0] for test, message in honest.items() if message is None}
    assert skipped == {
        "test_one_of_two_processes_is_lost",
        "test_two_processes_refit",
        "test_one_of_several_processes_is_lost",
        "test_several_processes_refit",
        "test_latecomers_are_given_the_last_refit",
        "test_a_latecomer_that_fails_harms_nobody",
        "test_a_latecomer_before_any_refit",
    }
    assert len(honest) > 60


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_engine_fails(results, broken):
    test, message = BROKEN[broken]
    assert message in (results[f"Test{broken}", test] or "it passed, or was skipped")


def test_the_suite_needs_pytest_only_where_it_is_used(tmp_path):
    code = """
import sys
sys.modules["pytest"] = None
import weightsync.testing
import weightsync.testing.tiny_models, weightsync.testing.streams, weightsync.testing.crew
try:
    from weightsync.testing import EngineConformance
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert said.stdout == "MissingDependencyError EngineConformance needs pytest: pip install pytest\n", (
        said.stderr
    )
