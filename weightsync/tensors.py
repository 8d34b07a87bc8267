"""What a tensor is on the wire: its description and its flat bytes. No I/O.

`TensorMeta` describes one chunk of one tensor, `WeightManifest` a whole refit. `flat_bytes` and
`tensor_from_bytes` are the only two places where a tensor becomes bytes and bytes a tensor again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
import torch
import xxhash

from weightsync.errors import LifecycleError, ManifestError

ALIGNMENT = 256
"""Byte alignment of every tensor inside a bucket: enough for any dtype's view and for wide copies."""

MAX_NAMES_SHOWN = 5
MAX_NAME_CHARS = 65_536
MAX_DIMENSIONS = 64
"""torch has no tensors of more."""

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not re.fullmatch(r"torch\.(q.*|bits.*|u?int[1-7])", str(value))
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a dtype: ``bfloat16``, ``float8_e4m3fn``, ...

    Raises:
        ManifestError: for dtypes that have no plain byte layout (quantised and ``bits`` types).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ManifestError(f"dtype {dtype} cannot be sent: it has no plain byte layout")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a wire name; the inverse of `dtype_name`."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ManifestError(f"unknown dtype {name!r}: the peer runs another torch version?") from None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One chunk of one tensor: the whole tensor when ``chunk_size == nbytes``.

    ``shape`` and ``dtype`` are the whole tensor's; ``chunk_offset`` and ``chunk_size`` are bytes within
    its flat form; ``offset`` is the chunk's place in its bucket (`None` before it is packed).
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    chunk_offset: int
    chunk_size: int
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether this chunk is the complete tensor."""
        return self.chunk_offset == 0 and self.chunk_size == self.nbytes

    @property
    def is_last(self) -> bool:
        """Whether this chunk ends its tensor."""
        return self.chunk_offset + self.chunk_size == self.nbytes


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of one tensor, as they travel. The limits hold for what is decoded."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    dtype: Annotated[str, msgspec.Meta(max_length=64)]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * dtype_from_name(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


class WeightManifest(msgspec.Struct, frozen=True):
    """Every tensor of a refit in the order of the stream. Names are unique."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def build(cls, tensors: Iterable[TensorSpec]) -> WeightManifest:
        """Make a manifest.

        Raises:
            ManifestError: a name comes twice.
        """
        specs = tuple(tensors)
        repeated = _repeated(spec.name for spec in specs)
        if repeated:
            raise ManifestError(f"repeated in the weight stream: {list_names(repeated)}", tensor=repeated[0])
        return cls(specs)

    def __len__(self) -> int:
        return len(self.tensors)

    def only(self, names: Collection[str]) -> WeightManifest:
        """Return the manifest of some of the tensors, in the same order.

        Raises:
            ManifestError: there is no tensor of one of the names.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted.difference(self.names))
        if unknown:
            raise ManifestError(f"not in the weight stream: {list_names(unknown)}", tensor=unknown[0])
        return WeightManifest(tuple(spec for spec in self.tensors if spec.name in wanted))

    @property
    def names(self) -> list[str]:
        """Tensor names in stream order."""
        return [spec.name for spec in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without alignment padding."""
        return sum(spec.nbytes for spec in self.tensors)

    def encode(self) -> bytes:
        """Return the tensors' descriptions as msgpack."""
        return msgspec.msgpack.encode(self.tensors)

    def digest(self) -> str:
        """Return an order-sensitive digest of names, shapes and dtypes: the identity of a layout."""
        return xxhash.xxh3_128_hexdigest(self.encode())


class WeightGenerator(Generator[tuple[str, torch.Tensor], None, None]):
    """Base of generators of ``(name, tensor)`` that are classes: they say how to `send` and to `close`."""

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any:
        """Close the stream and raise (generator protocol)."""
        self.close()
        return super().throw(typ, val, tb)  # type: ignore[arg-type]


class LocalMemory(Protocol):
    """What a rank holds of the tensors of a stream: a `weightsync.engines.base.RankMemory`."""

    @property
    def manifest(self) -> WeightManifest:
        """Of the stream."""

    @property
    def table(self) -> Any:
        """The `weightsync.layout.tables.RankTable`."""

    def storage(self, index: int) -> torch.Tensor | None:
        """Return the live memory of one of the table's storages."""


@runtime_checkable
class Selectable(Protocol):
    """Weights that can leave tensors out without making them."""

    def select(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return only these weights, in their order; what is asked is consumed through them only."""


class WeightStream(WeightGenerator):
    """A weight generator that knows its manifest before the first tensor is made.

    Engines take any generator of ``(name, tensor)``. Handed one of these, the built-in engines send the
    manifest first, so that the receiver can refuse a stream before anything is written.

    Args:
        manifest: what ``weights`` will yield, in order.
        weights: the generator; consumed once.
        shards: the memory in which this rank has its part of the tensors, if that is known.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        weights: Iterable[tuple[str, torch.Tensor]],
        shards: LocalMemory | None = None,
    ) -> None:
        self.manifest = manifest
        self.shards = shards
        self._weights: Iterator[tuple[str, torch.Tensor]] = iter(weights)
        self._begun = False
        self._closed = False
        self._selected = False

    def send(self, value: None) -> tuple[str, torch.Tensor]:
        """Return the next item (generator protocol; ``value`` is ignored)."""
        if self._selected:
            raise LifecycleError("of this weight stream some tensors were selected: consume those")
        if self._closed:
            raise StopIteration
        self._begun = True
        return next(self._weights)

    def select(self, names: Collection[str]) -> WeightStream:
        """Return a stream of only these tensors, in the order of this one, which is not consumed any more.

        Tensors that are made together (by a collective) are made only where one of them is selected, so all
        ranks have to select alike: before anything that may fail on one of them alone. From then on closing
        either stream takes part in what the selected tensors need, and a stream of which nothing is selected
        owes other ranks nothing. Of a plain generator the other tensors are made and dropped.

        Raises:
            ManifestError: there is no tensor of one of the names.
            LifecycleError: the stream has begun, or something was selected before.
        """
        if self._begun or self._closed or self._selected:
            raise LifecycleError("tensors are selected once, before the weight stream begins")
        manifest = self.manifest.only(names)
        weights = self._weights
        chosen = weights.select(names) if isinstance(weights, Selectable) else _only(weights, names)
        self._selected = True
        return WeightStream(manifest, chosen)

    def close(self) -> None:
        """End the stream, and close the underlying generator, so that its ``finally`` blocks run now."""
        self._closed = True
        close = getattr(self._weights, "close", None)
        if close is not None:
            close()


def _only(
    weights: Iterator[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = frozenset(names)
    try:
        for name, tensor in weights:
            if name in wanted:
                yield name, tensor
            del tensor
    finally:
        close = getattr(weights, "close", None)
        if close is not None:
            close()


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as they are sent: dense, contiguous, an ordinary tensor on its own device.

    Views where the memory is already plain, copies where it is strided, expanded, lazily conjugated or
    negated. Never keeps autograd history.

    Raises:
        ManifestError: the values are not in one plain memory: a sharded, wrapped, sparse, quantised, lazy
            or ``meta`` tensor, or no tensor at all.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ManifestError(f"a {type(tensor).__name__} is no tensor")
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise ManifestError("the tensor has no values yet: it is lazy, or on the meta device")
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ManifestError(
            f"a {type(tensor).__name__} ({tensor.layout}) has no plain bytes: send what its full_tensor() "
            "or dequantize() returns"
        )
    ordinary = tensor.detach().as_subclass(torch.Tensor)
    return ordinary.resolve_conj().resolve_neg().contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a flat ``uint8`` tensor, shape ``(nbytes,)``; see `plain_tensor`."""
    plain = plain_tensor(tensor)
    if plain.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # Not reshape: a step of `w[::2]` survives it where one element is left, and then no view is possible.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def tensor_from_bytes(data: torch.Tensor, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """View flat ``uint8`` data as a tensor; copies only when misaligned.

    Raises:
        ManifestError: the data is not as long as shape and dtype say, or the shape is none.
    """
    sizes = tuple(shape)
    expected = prod(sizes) * dtype.itemsize
    if min(sizes, default=0) < 0 or data.numel() != expected:
        raise ManifestError(f"{data.numel()} bytes cannot be a tensor of shape {list(sizes)} and {dtype}")
    if expected == 0:
        return torch.empty(sizes, dtype=dtype, device=data.device)
    if (data.data_ptr() % dtype.itemsize) or (data.storage_offset() % dtype.itemsize):
        data = data.clone()
    return data.view(dtype).view(sizes)


def list_names(names: Iterable[str]) -> str:
    """Return a bounded, quoted list of names for an error message."""
    shown = list(names)
    text = ", ".join(repr(_clip(name)) for name in shown[:MAX_NAMES_SHOWN])
    return text + (f" and {len(shown) - MAX_NAMES_SHOWN} more" if len(shown) > MAX_NAMES_SHOWN else "")


def _clip(name: str, limit: int = 160) -> str:
    return name if len(name) <= limit else f"{name[:limit]}..."


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
