"""Links for guests: peers that come later, with a ticket, one at a time."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from tests.control_support import FAST, RawClient, background, hubs, wait_until
from weightsync.control import Complete, ControlHub, Done
from weightsync.errors import ConfigurationError, DeadlineError, LifecycleError, PeerLostError


@pytest.fixture
def pair():
    with hubs() as (server, client):
        link = server.accept_guests()
        yield server, client, link


def arrive(server, link, hub):
    return hub.connect(server.card(), ticket=link.ticket.to_dict())


def test_a_guest_is_answered_under_the_servers_epoch_and_version(pair):
    server, client, link = pair
    guest = arrive(server, link, client)
    future = background(guest.begin, epoch=None)
    wait_until(lambda: link.is_asked)
    assert link.begin(epoch=7, version=3) == (7, 3)
    assert future.result(5) == (7, 3)
    assert not link.is_asked
    guest.send(Complete())
    assert link.receive(Complete, phase="test") == Complete()
    link.send(Done(1, 2, 3, "d"))
    link.end()
    assert guest.receive(Done, phase="test") == Done(1, 2, 3, "d")


def test_guests_are_served_after_each_other_under_one_epoch(pair):
    server, _, link = pair
    for _ in range(3):
        with ControlHub("guest", bind_host="127.0.0.1", deadlines=FAST) as hub:
            guest = arrive(server, link, hub)
            future = background(guest.begin, epoch=None)
            wait_until(lambda: link.is_asked)
            assert link.begin(epoch=4, version=4) == (4, 4)
            assert future.result(5) == (4, 4)
            guest.send(Complete())
            assert link.receive(Complete, phase="test") == Complete()
            link.end()


@pytest.mark.slow
def test_of_many_guests_at_once_each_has_its_turn(pair):
    server, _, link = pair
    served, together, most = [], 0, 0
    lock = threading.Lock()

    def visit(number):
        nonlocal together, most
        with ControlHub(f"guest {number}", bind_host="127.0.0.1", deadlines=FAST) as hub:
            guest = arrive(server, link, hub)
            guest.begin(epoch=None, connect_s=20)
            with lock:
                together, most = together + 1, max(most, together + 1)
            guest.send(Done(number, 0, 0, ""))
            guest.receive(Complete, phase="test")
            with lock:
                together -= 1

    visits = [background(visit, number) for number in range(6)]
    while len(served) < 6:
        wait_until(lambda: link.is_asked)
        link.begin(epoch=1)
        served.append(link.receive(Done, phase="test").buckets)
        time.sleep(0.02)
        link.send(Complete())
        link.end()
    for each in visits:
        each.result(5)
    assert sorted(served) == list(range(6))
    assert most == 1


def test_a_guest_that_is_killed_makes_room_for_the_next(pair):
    server, client, link = pair
    first = ControlHub("first", bind_host="127.0.0.1", deadlines=FAST)
    lost = arrive(server, link, first)
    future = background(lost.begin, epoch=None)
    wait_until(lambda: link.is_asked)
    link.begin(epoch=1)
    future.result(5)
    second = background(arrive(server, link, client).begin, epoch=None)
    first.close()
    with pytest.raises(PeerLostError, match="a latecomer left the refit"):
        link.receive(Complete, phase="test")
    link.end()
    wait_until(lambda: link.is_asked)
    link.begin(epoch=1)
    assert second.result(5) == (1, None)


def test_without_a_ticket_nobody_comes_in(pair):
    server, client, link = pair
    with pytest.raises(ConfigurationError, match="CURVE key pair") as caught:
        client.connect(server.card(), ticket={**link.ticket.to_dict(), "public_key": "x" * 40})
    assert link.ticket.secret_key not in str(caught.value)
    with pytest.raises(ConfigurationError, match="CURVE key pair"):
        client.connect(server.card(), ticket={})
    public, secret = zmq.curve_keypair()
    stranger = {"public_key": public.decode(), "secret_key": secret.decode()}
    with pytest.raises(DeadlineError):
        client.connect(server.card(), ticket=stranger).begin(epoch=None, connect_s=1)
    assert server.counters["unauthenticated"] > 0
    assert not link.is_asked


def test_the_card_does_not_hold_the_ticket(pair):
    server, _, link = pair
    assert link.ticket.secret_key not in str(server.card())
    assert link.ticket.public_key not in str(server.card())


def test_a_closed_hub_ends_the_wait_for_guests():
    with hubs() as (server, _):
        link = server.accept_guests()
        waiting = background(link.begin, epoch=1)
        server.close()
        with pytest.raises(LifecycleError):
            waiting.result(5)


def test_a_guest_may_be_raw(pair):
    """A holder of the ticket that says nonsense is refused like any peer."""
    server, _, link = pair
    ticket = link.ticket
    with RawClient(server.card(), keys=ticket.keys) as raw:
        raw.raw([b"nonsense"])
        wait_until(lambda: server.counters["malformed"] == 1)
    assert not link.is_asked
