"""A peer in another process that is killed, stopped, restarted or fails: typed errors, within bounds."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.control_support import FAST, Process, background, open_pair
from weightsync.control import Bucket, Complete, ControlHub, Deadlines, Release
from weightsync.errors import DeadlineError, LifecycleError, ManifestError, PeerAbortedError, PeerLostError

pytestmark = pytest.mark.slow

SIDES = ["client", "server"]
SILENCE_S = 1.5
IMPATIENT = Deadlines(connect_s=8, stall_s=8, silence_s=SILENCE_S, heartbeat_s=0.2)


@pytest.fixture
def hub():
    with ControlHub("here", bind_host="127.0.0.1", deadlines=IMPATIENT) as hub:
        yield hub


def serve(hub, link, pipe):
    """Open a refit, say so, and answer releases until something ends it; report what."""
    link.begin(epoch=1)
    pipe.send("open")
    try:
        while True:
            link.receive(Release, phase="serve")
            link.send(Bucket(0, 0, 0, ()))
    except Exception as error:  # noqa: BLE001 - reported
        pipe.send((type(error).__name__, str(error)))
        time.sleep(20)


def opened(hub, side, behave=serve, deadlines=IMPATIENT):
    peer = Process(hub, behave, side=side, deadlines=deadlines)
    peer.link.begin(epoch=1)
    assert peer.hear() == "open"
    return peer


@pytest.mark.parametrize("side", SIDES)
def test_a_killed_peer_is_lost_within_a_second(hub, side):
    with opened(hub, side) as peer:
        waiting = background(peer.link.receive, phase="load")
        time.sleep(0.3)
        started = time.monotonic()
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="lost: its connection") as caught:
            waiting.result(3)
        assert time.monotonic() - started < 1
        assert caught.value.context.phase == "load"
        with pytest.raises(PeerLostError):
            peer.link.check()
        with pytest.raises(PeerLostError):
            peer.link.send(Release(0))
        started = time.monotonic()
        peer.link.abort(ValueError("give up"))
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("side", SIDES)
def test_a_killed_peer_is_noticed_by_its_connection_not_by_the_heartbeats(side):
    patient = Deadlines(connect_s=8, stall_s=8, silence_s=60, heartbeat_s=15)
    with (
        ControlHub("here", bind_host="127.0.0.1", deadlines=patient) as hub,
        opened(hub, side, deadlines=patient) as peer,
    ):
        time.sleep(0.3)
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="lost: its connection"):
            peer.link.receive(phase="load", timeout_s=1)


@pytest.mark.parametrize("side", SIDES)
def test_one_killed_peer_of_several_is_told_apart(hub, side):
    peers = [opened(hub, side) for _ in range(3)]
    try:
        os.kill(peers[1].pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            peers[1].link.receive(phase="load", timeout_s=2)
        time.sleep(0.7)
        for peer in (peers[0], peers[2]):
            peer.link.send(Release(1))
            peer.link.receive(Bucket, phase="load")
    finally:
        for peer in peers:
            peer.__exit__()


@pytest.mark.parametrize("side", SIDES)
def test_a_stopped_peer_is_lost_after_the_silence_and_learns_of_it(hub, side):
    with opened(hub, side) as peer:
        started = time.monotonic()
        os.kill(peer.pid, signal.SIGSTOP)
        with pytest.raises(
            PeerLostError, match=r"silent for 1\.. s, stopped or unreachable; last heard"
        ) as caught:
            peer.link.receive(phase="load")
        assert SILENCE_S - 0.5 < time.monotonic() - started < SILENCE_S + 1
        started = time.monotonic()
        peer.link.abort(caught.value)
        assert time.monotonic() - started < 1.2
        os.kill(peer.pid, signal.SIGCONT)
        kind, text = peer.hear(5)
        assert kind == "PeerAbortedError"
        assert "silent for" in text


@pytest.mark.parametrize("side", SIDES)
def test_a_peer_stopped_for_less_than_the_silence_is_forgiven(hub, side):
    with opened(hub, side) as peer:
        os.kill(peer.pid, signal.SIGSTOP)
        time.sleep(SILENCE_S / 2)
        os.kill(peer.pid, signal.SIGCONT)
        peer.link.send(Release(1))
        assert peer.link.receive(Bucket, phase="load").seq == 0


@pytest.mark.parametrize("side", SIDES)
def test_a_peer_that_dies_before_the_handshake_is_a_deadline(hub, side):
    with Process(hub, sleep, side=side, deadlines=IMPATIENT) as peer:
        os.kill(peer.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DeadlineError, match="did not begin epoch 1"):
            peer.link.begin(epoch=1, connect_s=1)
        assert time.monotonic() - started < 2


def sleep(hub, link, pipe):
    time.sleep(20)


def die_speaking(hub, link, pipe):
    link.begin(epoch=1)
    link.send(Bucket(7, 0, 0, ()))
    link.abort(ManifestError("the last words", tensor="w"))
    os.kill(os.getpid(), signal.SIGKILL)


def die_complete(hub, link, pipe):
    link.begin(epoch=1)
    link.send(Complete())
    link.end()
    hub.close()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("side", SIDES)
def test_the_last_words_of_a_dying_peer_are_heard(hub, side):
    with Process(hub, die_speaking, side=side, deadlines=IMPATIENT) as peer:
        peer.link.begin(epoch=1)
        with pytest.raises(PeerAbortedError, match="the last words"):
            while True:
                peer.link.receive(phase="load", timeout_s=3)


@pytest.mark.parametrize("side", SIDES)
def test_a_peer_that_completes_and_goes_has_completed(hub, side):
    with Process(hub, die_complete, side=side, deadlines=IMPATIENT) as peer:
        peer.link.begin(epoch=1)
        peer.process.join(5)
        time.sleep(0.5)
        peer.link.check()
        assert peer.link.receive(Complete, phase="load") == Complete()


def fail_deep(hub, link, pipe):
    link.begin(epoch=1)
    pipe.send("open")
    try:
        _load_third_layer()
    except ManifestError as error:
        pipe.send(time.monotonic())
        link.abort(error)
    time.sleep(20)


def _load_third_layer():
    raise ManifestError("unknown tensor", tensor="layer.3\0é")


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_crosses_processes_in_under_a_second(hub, side):
    with opened(hub, side, fail_deep) as peer:
        with pytest.raises(PeerAbortedError) as caught:
            peer.link.receive(phase="load")
        assert time.monotonic() - peer.hear() < 1
        assert "_load_third_layer" in caught.value.remote.traceback
        assert caught.value.remote.context.tensor == "layer.3\0é"


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_reaches_a_peer_in_another_process(hub, side):
    with opened(hub, side) as peer:
        try:
            _load_third_layer()
        except ManifestError as error:
            started = time.monotonic()
            peer.link.abort(error)
        assert time.monotonic() - started < 1
        kind, text = peer.hear(1)
        assert kind == "PeerAbortedError"
        assert "unknown tensor" in text


@pytest.mark.parametrize("side", SIDES)
def test_a_restarted_peer_is_met_on_a_new_link(hub, side):
    with opened(hub, side) as peer:
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError):
            peer.link.receive(phase="load", timeout_s=3)
        peer.link.close()
    with opened(hub, side) as peer:
        peer.link.send(Release(1))
        assert peer.link.receive(Bucket, phase="load").seq == 0


def break_connection_once(hub, link, pipe):
    """Lose the TCP connection (not the process) and begin again on the same link."""
    link.begin(epoch=1)
    pipe.send("open")
    pipe.recv()
    hub.submit(link.release_wire)
    link.end()
    link.begin(epoch=2)
    link.send(Release(42))
    time.sleep(20)


def test_a_lost_connection_ends_the_refit_but_not_the_link(hub):
    with opened(hub, "client", break_connection_once) as peer:
        waiting = background(peer.link.receive, phase="load")
        peer.pipe.send("break")
        with pytest.raises(PeerLostError):
            waiting.result(3)
        peer.link.end()
        peer.link.begin(epoch=2)
        assert peer.link.receive(Release, phase="load").seq == 42


def test_a_process_that_forgets_to_close_ends_and_says_good_bye():
    code = """
        import json, sys
        from weightsync.control import ControlHub
        hub = ControlHub("forgetful", bind_host="127.0.0.1")
        print(json.dumps(hub.card()), flush=True)
        link = hub.accept(json.loads(sys.stdin.readline()))
        link.begin(epoch=1)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(code)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ControlHub("here", bind_host="127.0.0.1", deadlines=FAST) as hub,
    ):
        link = hub.connect(json.loads(process.stdout.readline()))
        process.stdin.write(json.dumps(hub.card()) + "\n")
        process.stdin.flush()
        link.begin(epoch=1)
        with pytest.raises(PeerLostError, match="closed its control channel"):
            link.receive(phase="load", timeout_s=5)
        assert process.wait(5) == 0


def test_a_forked_child_does_not_use_the_parents_hub():
    with open_pair() as (server, client):
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(LifecycleError, match="before a fork"):
                    client.send(Release(9))
                server._host.close(), client._host.close()
                os._exit(0)
            finally:
                os._exit(1)
        limit = time.monotonic() + 5
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
            time.sleep(0.02)
        assert done == (child, 0)
        client.send(Release(1))
        assert server.receive(phase="x") == Release(1)
