"""Cards: what a worker tells its peers, through the driver, about its control channel."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import zmq.utils.z85

from weightsync.control.addresses import Endpoint
from weightsync.errors import ConfigurationError

MAX_NAME_CHARS = 200
_FIELDS = ("name", "address", "public_key", "session")


def require_name(name: object) -> None:
    """Check a worker's name.

    Raises:
        ConfigurationError: it is not 1 to 200 characters of valid unicode.
    """
    plain = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
    if not plain or any("\ud800" <= c <= "\udfff" for c in str(name)):
        raise ConfigurationError(
            f"a worker's name must have 1 to {MAX_NAME_CHARS} characters, got {name!r:.300}"
        )


@dataclass(frozen=True, slots=True)
class Card:
    """A hub's name, ``tcp://host:port``, CURVE public key (Z85, 40 characters) and session id."""

    name: str
    address: str
    public_key: str
    session: str

    @classmethod
    def parse(cls, data: Any) -> Card:
        """Check plain data from a peer.

        Raises:
            ConfigurationError: it is no card; says which field is wrong.
        """
        if not isinstance(data, dict) or any(not isinstance(data.get(name), str) for name in _FIELDS):
            raise ConfigurationError(
                f"a peer's card must hold the strings {', '.join(_FIELDS)}; got {data!r:.300}"
            )
        card = cls(**{name: data[name] for name in _FIELDS})
        require_name(card.name)
        Endpoint.parse(card.address)
        card._require_key()
        if not re.fullmatch(r"[0-9a-f]{8,64}", card.session):
            raise ConfigurationError(f"the card of {card.name!r} has the session {card.session!r:.100}")
        return card

    def _require_key(self) -> None:
        try:
            valid = len(self.public_key) == 40 and len(zmq.utils.z85.decode(self.public_key)) == 32
        except (ValueError, KeyError, ArithmeticError):
            valid = False
        if not valid:
            raise ConfigurationError(
                f"the card of {self.name!r} holds no CURVE public key (40 Z85 characters)"
            )

    @property
    def endpoint(self) -> Endpoint:
        """The address, taken apart."""
        return Endpoint.parse(self.address)

    def to_dict(self) -> dict[str, str]:
        """Return plain data for any RPC layer."""
        return asdict(self)
