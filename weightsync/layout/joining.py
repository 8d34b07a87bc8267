"""From what the ranks of one side tell to that side's `Layout`. No I/O.

Ranks that name the same storages for the same tensors are looked at once, however many they are.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.pieces import ABSENT, Layout, LayoutBuilder, Pattern, Piece, TensorInfo
from weightsync.layout.regions import Box
from weightsync.layout.tables import Held, RankTable
from weightsync.tensors import TensorSpec, WeightManifest, dtype_from_name


def tensor_infos(manifest: WeightManifest) -> list[TensorInfo]:
    """Return what the planner needs to know of a manifest's tensors, as they are sent."""
    return [_info(spec) for spec in manifest.tensors]


def _info(spec: TensorSpec) -> TensorInfo:
    return TensorInfo(spec.name, tuple(spec.shape), dtype_from_name(spec.dtype).itemsize)


def join_tables(
    side: str, manifest: WeightManifest, tables: Sequence[RankTable], *, without: Collection[str] = ()
) -> Layout:
    """Make the layout of one side from its ranks' tables.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        manifest: of the refit.
        tables: by rank.
        without: tensors that are not moved by regions; no rank has them in the layout.

    Raises:
        ManifestError: a rank's table is of another manifest.
        ConfigurationError: a table does not fit the manifest, or itself.
    """
    _require_manifest(side, manifest, tables)
    builder, infos = LayoutBuilder(side, len(tables)), tensor_infos(manifest)
    left_out = frozenset(without)
    kinds = _kinds(tables)
    if side == "rollout":
        _require_writable(manifest, tables, kinds, left_out)
    holders: list[list[_Kind]] = [[] for _ in infos]
    for kind in kinds:
        for index in kind.table.held_tensors().tolist():
            holders[index].append(kind)
    for index, (info, having) in enumerate(zip(infos, holders, strict=True)):
        if info.name in left_out or not having:
            builder.add(info, ABSENT)
            continue
        names = list(dict.fromkeys(kind.names[slot] for kind in having for slot in kind.table.slots[index]))
        key = (info.shape, tuple(kind.key(index, names) for kind in having))
        known = builder.known(key)
        if known is None:
            pieces = [piece for kind in having for piece in _pieces(tables, kind, index, names)]
            known = builder.add_pattern(key, _pattern(side, info, pieces))
        builder.add(info, known, *names)
    return builder.build()


@dataclass(frozen=True, eq=False)
class _Kind:
    """Ranks whose tables differ in nothing but their patterns' boxes."""

    number: int
    ranks: list[int]
    table: RankTable
    """Of the first of them."""
    names: list[str]
    """Of its storages."""
    sizes: list[int]
    """Elements of its storages."""

    def key(self, tensor: int, names: list[str]) -> Hashable:
        """Return all that the pieces of a tensor follow from."""
        slots = self.table.slots[tensor]
        where = tuple((names.index(self.names[slot]), self.sizes[slot]) for slot in slots)
        return self.number, self.table.pattern_of[tensor], where


def _kinds(tables: Sequence[RankTable]) -> list[_Kind]:
    found: dict[Hashable, _Kind] = {}
    for rank, table in enumerate(tables):
        key = table.storages, table.pattern_of, table.slots
        kind = found.get(key)
        if kind is None:
            names = [storage.name for storage in table.storages]
            sizes = [storage.numel for storage in table.storages]
            found[key] = _Kind(len(found), [rank], table, names, sizes)
        else:
            kind.ranks.append(rank)
    return list(found.values())


def _pieces(tables: Sequence[RankTable], kind: _Kind, tensor: int, names: list[str]) -> Iterator[Piece]:
    slots = kind.table.slots[tensor]
    for rank in kind.ranks:
        for held in tables[rank].patterns[kind.table.pattern_of[tensor]]:
            slot = slots[held.slot]
            at = names.index(kind.names[slot])
            yield Piece(rank, Box(held.lo, held.hi), held.offset, held.strides, kind.sizes[slot], at)


def _pattern(side: str, info: TensorInfo, pieces: Sequence[Piece]) -> Pattern:
    try:
        return Pattern.of(info.shape, pieces)
    except ConfigurationError as error:
        raise error.with_context(side=side, tensor=info.name) from None


def _require_manifest(side: str, manifest: WeightManifest, tables: Sequence[RankTable]) -> None:
    digest, names = manifest.digest(), {spec.name for spec in manifest.tensors}
    for rank, table in enumerate(tables):
        if table.manifest != digest:
            raise ManifestError(
                "this rank's layout was made for other tensors: call init_communicator again",
                side=side, rank=rank,
            )  # fmt: skip
        if len(table.pattern_of) != len(names):
            raise ConfigurationError("a layout does not have one entry for each tensor", side=side, rank=rank)
        if not names.issuperset(table.whole):
            unknown = min(set(table.whole) - names)
            raise ConfigurationError(
                f"a layout is to have {unknown!r:.200} whole, which is no tensor of the refit",
                side=side,
                rank=rank,
            )


def _require_writable(
    manifest: WeightManifest, tables: Sequence[RankTable], kinds: Sequence[_Kind], left_out: Collection[str]
) -> None:
    """Check that what comes has the dtype of what it is written into, and that no box overlaps itself."""
    dtypes = [spec.dtype for spec in manifest.tensors]
    moved = [spec.name not in left_out for spec in manifest.tensors]
    for kind in kinds:
        stored = [storage.dtype for storage in kind.table.storages]
        for index in kind.table.held_tensors().tolist():
            if moved[index] and any(stored[slot] != dtypes[index] for slot in kind.table.slots[index]):
                raise ConfigurationError(
                    f"what is sent as {dtypes[index]} cannot be written into a storage of another dtype",
                    side="rollout", rank=kind.ranks[0], tensor=manifest.tensors[index].name,
                )  # fmt: skip
    for rank, table in enumerate(tables):
        if any(_overlaps_itself(held) for pattern in table.patterns for held in pattern):
            raise ConfigurationError(
                "a layout has a box with two elements in one place", side="rollout", rank=rank
            )


def _overlaps_itself(held: Held) -> bool:
    """Whether two elements of a box may be in one place of its storage."""
    reach = 0
    sizes = [hi - lo for lo, hi in zip(held.lo, held.hi, strict=True)]
    for stride, size in sorted(zip(held.strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
