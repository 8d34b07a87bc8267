"""What the tests of the control channel share: pairs of hubs, raw peers, peers in their own process."""

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import zmq

from weightsync.control import PROTOCOL_VERSION, ControlHub, Deadlines
from weightsync.control.frames import Header, encode_header, encode_message

FAST = Deadlines(connect_s=8, stall_s=8, total_s=60, silence_s=2, heartbeat_s=0.2)


def background(call, *args, **kwargs):
    """Run a blocking call on a thread; its future."""
    future = Future()

    def run():
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - handed to the waiter
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition, seconds=5.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        time.sleep(0.01)


@contextlib.contextmanager
def hubs(host="127.0.0.1", deadlines=FAST, **kwargs):
    """Two hubs; the first is to be the server."""
    with (
        ControlHub("policy 0", bind_host=host, deadlines=deadlines, **kwargs) as server,
        ControlHub("rollout 0", bind_host=host, deadlines=deadlines, **kwargs) as client,
    ):
        yield server, client


@contextlib.contextmanager
def links(**kwargs):
    """Both ends of one link: server, client."""
    with hubs(**kwargs) as (server, client):
        yield server.accept(client.card()), client.connect(server.card())


def begin(server, client, epoch=1, version=None):
    future = background(server.begin, epoch=epoch, version=version)
    agreed = client.begin(epoch=epoch)
    assert future.result(10) == agreed
    return agreed


@contextlib.contextmanager
def open_pair(**kwargs):
    with links(**kwargs) as (server, client):
        begin(server, client)
        yield server, client


class RawClient:
    """A CURVE client without a hub, to say what a hub never would."""

    def __init__(self, card, keys=None, name="raw 0"):
        self.public, self.secret = keys or zmq.curve_keypair()
        self.target = card
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = self.socket.sndtimeo = 5000
        self.socket.curve_serverkey = card["public_key"].encode()
        self.socket.curve_publickey, self.socket.curve_secretkey = self.public, self.secret
        self.name = name
        self.dial()

    def dial(self):
        self.socket.connect(self.target["address"])

    def card(self):
        return {
            "name": self.name,
            "address": "tcp://127.0.0.1:9",
            "public_key": self.public.decode(),
            "session": "ab" * 16,
        }

    def send(
        self, message, *, epoch=None, token=b"", number=0, protocol=PROTOCOL_VERSION, session=None, **changes
    ):
        header = Header(protocol, session or self.target["session"], epoch, token, number)
        self.raw([encode_header(replace(header, **changes) if changes else header), *encode_message(message)])

    def raw(self, parts):
        self.socket.send_multipart(parts)

    def close(self):
        self.socket.close(0)
        self.context.term()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["weightsync.control", "tests.control_support"])


class Process:
    """A peer in its own process: runs ``behave(hub, link, report)`` as the server or the client."""

    def __init__(self, hub, behave, *, side, deadlines=FAST, session=None):
        self.pipe, theirs = _forks.Pipe()
        self.process = _forks.Process(
            target=_live, args=(theirs, behave, side, deadlines, hub.card()), daemon=True
        )
        self.process.start()
        theirs.close()
        self.card = self.hear(20)
        self.link = hub.accept(self.card) if side == "client" else hub.connect(self.card)
        self.pipe.send("go")

    @property
    def pid(self):
        return self.process.pid

    def hear(self, seconds=10):
        assert self.pipe.poll(seconds), "the peer's process said nothing"
        return self.pipe.recv()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.process.close()


def _live(pipe, behave, side, deadlines, peer_card):
    with ControlHub(f"{side} process", bind_host="127.0.0.1", deadlines=deadlines) as hub:
        pipe.send(hub.card())
        pipe.recv()
        link = hub.connect(peer_card) if side == "client" else hub.accept(peer_card)
        behave(hub, link, pipe)
