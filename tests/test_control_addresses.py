"""Addresses of the control channel: what is bound, what is advertised, what is refused and why."""

import socket

import pytest

from weightsync.control import ControlHub, Deadlines, default_host
from weightsync.control.addresses import (
    Endpoint,
    choose_hosts,
    is_loopback,
    is_this_host,
    is_wildcard,
    plain_host,
    require_reachable,
    require_reachable_from,
    uses_ipv6,
)
from weightsync.control.cards import Card
from weightsync.errors import ConfigurationError

FAR = "203.0.113.77"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:80", "127.0.0.1", 80),
        ("tcp://[::1]:5555", "::1", 5555),
        ("tcp://node-7.cluster:65535", "node-7.cluster", 65535),
    ],
)
def test_endpoints_are_read_and_written_back(text, host, port):
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:80", "tcp://", "tcp://:80", "tcp://a", "tcp://a:", "tcp://a:0", "tcp://a:65536", "tcp://a:b",
     "tcp://::1:80", "tcp://[::1]", "tcp://[a]:80", "ipc://x", "tcp://a:²"],
)  # fmt: skip
def test_malformed_endpoints_say_what_to_write(text):
    with pytest.raises(ConfigurationError, match="tcp://host:port"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("10.0.0.5:5000", "'10.0.0.5'"),
        ("tcp://10.0.0.5:5000", "'10.0.0.5'"),
        ("[::1]:5000", "'::1'"),
        ("", "for example"),
        ("two words", "for example"),
    ],
)
def test_a_host_with_a_port_is_refused_with_what_to_write(host, hint):
    with pytest.raises(ConfigurationError, match="is not a host") as caught:
        plain_host(host, "bind_host")
    assert hint in str(caught.value)
    assert "bind_host=" in str(caught.value)


def test_ipv6_literals_may_come_in_brackets():
    assert plain_host("[fe80::1]", "bind_host") == "fe80::1"
    assert plain_host("fe80::1", "bind_host") == "fe80::1"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]", "*"])
def test_a_wildcard_is_bound_but_never_advertised(wildcard):
    with pytest.raises(ConfigurationError, match="advertise_host"):
        choose_hosts(wildcard, None)
    with pytest.raises(ConfigurationError, match="advertise_host"):
        choose_hosts("127.0.0.1", wildcard)
    assert choose_hosts(wildcard, "10.0.0.5")[1] == "10.0.0.5"


@pytest.mark.parametrize("bind", ["0.0.0.0", "*", "::"])
def test_a_hub_listens_on_a_wildcard_when_it_is_told_what_to_advertise(bind):
    with ControlHub("w", bind_host=bind, advertise_host="127.0.0.1") as hub:
        endpoint = Endpoint.parse(hub.card()["address"])
        assert endpoint.host == "127.0.0.1"
        socket.create_connection((endpoint.host, endpoint.port), timeout=2).close()


def test_the_default_host_is_an_address_of_this_host_and_no_wildcard():
    host = default_host()
    assert is_this_host(host)
    assert not is_wildcard(host)
    assert choose_hosts(None, None) == (host, host)


def test_without_any_route_the_default_host_is_the_loopback(monkeypatch):
    def unroutable(self, address):
        raise OSError("network is unreachable")

    monkeypatch.setattr("weightsync.control.addresses.socket.socket.connect", unroutable, raising=False)
    assert default_host() == "127.0.0.1"


def test_literals_are_recognised():
    loopbacks = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"]
    assert [is_loopback(h) for h in [*loopbacks, "10.0.0.1", "node"]] == [True] * 5 + [False] * 2
    assert [is_wildcard(h) for h in ["0.0.0.0", "::", "*", "::ffff:0.0.0.0", "10.0.0.1"]] == [True] * 4 + [
        False
    ]
    assert [uses_ipv6(h) for h in ["::1", "127.0.0.1", "no-such-host.invalid"]] == [True, False, False]


def test_a_loopback_address_is_not_advertised_to_another_host():
    own = Endpoint("127.0.0.1", 5000)
    with pytest.raises(ConfigurationError, match="advertise_host"):
        require_reachable_from(own, Endpoint(FAR, 5000), "rollout 3")
    require_reachable_from(own, Endpoint("127.0.0.1", 5001), "rollout 3")
    require_reachable_from(own, Endpoint(default_host(), 5001), "rollout 3")


def test_a_peers_loopback_address_is_believed_only_where_something_listens():
    own = Endpoint("10.0.0.5", 5000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        require_reachable(own, Endpoint("127.0.0.1", port), "rollout 3")
    with pytest.raises(ConfigurationError, match="loopback"):
        require_reachable(own, Endpoint("127.0.0.1", port), "rollout 3")


def test_accept_and_connect_check_the_addresses():
    with ControlHub("a", bind_host="127.0.0.1") as hub:
        far = {**ControlHubCard.make(), "address": f"tcp://{FAR}:5000"}
        with pytest.raises(ConfigurationError, match="loopback"):
            hub.accept(far)


class ControlHubCard:
    @staticmethod
    def make():
        with ControlHub("b", bind_host="127.0.0.1") as hub:
            return hub.card()


def test_an_address_of_another_host_cannot_be_bound():
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        ControlHub("a", bind_host=FAR)


@pytest.mark.parametrize(
    "change",
    [
        {"address": "127.0.0.1:5000"},
        {"public_key": "short"},
        {"public_key": "é" * 40},
        {"public_key": " " * 40},
        {"session": ""},
        {"session": "xyz\0" * 4},
        {"name": None},
    ],
)
def test_malformed_cards_are_refused(change):
    card = ControlHubCard.make()
    assert Card.parse(card).to_dict() == card
    with pytest.raises(ConfigurationError):
        Card.parse({**card, **change})
    with pytest.raises(ConfigurationError, match="card"):
        Card.parse([card])


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_deadlines_are_positive_numbers(value):
    with pytest.raises(ConfigurationError, match="stall_s"):
        Deadlines(stall_s=value)


def test_heartbeats_fit_into_the_silence():
    assert Deadlines().beat_s == 1.0
    assert Deadlines(silence_s=1).beat_s == 0.25
