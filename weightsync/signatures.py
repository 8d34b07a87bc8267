"""Which keywords a class's constructor takes, those that it hands on to its base classes included. No I/O."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Constructor:
    """What a constructor can be called with.

    Attributes:
        names: the keywords that it or, behind its ``**``, a base class names; its own first.
        required: those of its own that have no default.
        takes_any: whether it ends in a ``**`` with no constructor behind it that names what it takes.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool

    def takes(self, name: str) -> bool:
        """Return whether a keyword may be given."""
        return self.takes_any or name in self.names


def constructor_of(cls: type) -> Constructor:
    """Return what a class's constructor takes.

    A constructor that ends in ``**common`` is read as handing that on: the next one in the order of base
    classes is looked at too, and so on for as long as they end in ``**``.
    """
    chain = _constructors(cls)
    own = next(chain)
    names = dict.fromkeys(p.name for p in own if p.kind in _NAMED)
    takes_any = _open_ended(own)
    for parameters in chain if takes_any else ():
        names |= dict.fromkeys(p.name for p in parameters if p.kind in _NAMED)
        if not _open_ended(parameters):
            takes_any = False
            break
    required = tuple(p.name for p in own if p.default is Parameter.empty and p.kind not in _VARIADIC)
    return Constructor(tuple(names), required, takes_any)


def _constructors(cls: type) -> Iterator[list[Parameter]]:
    """Yield the parameters of every constructor, in the order of base classes; at least one."""
    found = [vars(each)["__init__"] for each in cls.__mro__[:-1] if "__init__" in vars(each)]
    if not found:
        yield list(inspect.signature(cls).parameters.values())
    for constructor in found:
        yield list(inspect.signature(constructor).parameters.values())[1:]


def _open_ended(parameters: list[Parameter]) -> bool:
    return any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
