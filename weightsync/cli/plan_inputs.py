"""What `weightsync plan` reads of a model: ``config.json``, a safetensors index, the headers beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.layout.families import ARCHITECTURES, ModelTensors, architecture, list_tensors
from weightsync.layout.generic import tensors_by_name
from weightsync.layout.pieces import TensorInfo
from weightsync.tensors import dtype_from_name, list_names

_INDEX = "model.safetensors.index.json"
_WANTED = f"give a model's config.json, its {_INDEX}, or the directory that has them"
_MAX_HEADER = 256 << 20
_MAX_REASON = 200


@dataclass(frozen=True)
class PlanModel:
    """A model to plan for.

    Attributes:
        config: contents of its ``config.json``.
        tensors: what a policy sends, in order.
        has_rules: whether the layouts of its family are known by rule.
    """

    config: Mapping[str, Any]
    tensors: ModelTensors
    has_rules: bool


def read_model(path: Path) -> PlanModel:
    """Read what is needed of a model; no weights.

    Args:
        path: ``config.json``, ``model.safetensors.index.json``, or the directory that has them. An index
            needs its config beside it; where the safetensors files are there too, their headers are read.

    Raises:
        ConfigurationError: a file is missing or odd, or the index does not fit the config.
    """
    if path.is_dir():
        path = next((path / name for name in (_INDEX, "config.json") if (path / name).is_file()), path)
    values = _read_json(path)
    if "weight_map" not in values:
        return _from_config(values)
    config = _read_json(path.with_name("config.json"))
    return _from_index(config, values["weight_map"], path.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}): {_WANTED}") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is no JSON ({error}): {_WANTED}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} is no config.json and no safetensors index: it holds no object")
    return values


def _from_config(config: Mapping[str, Any]) -> PlanModel:
    if architecture(config) in ARCHITECTURES:
        return PlanModel(config, list_tensors(config), True)
    infos = _transformers_tensors(config)
    tied = bool(config.get("tie_word_embeddings", False))
    return PlanModel(config, tensors_by_name(infos, tied=tied), False)


def _from_index(config: Mapping[str, Any], names: Any, directory: Path) -> PlanModel:
    if not isinstance(names, dict) or not names:
        raise ConfigurationError("the safetensors index has an empty weight_map")
    headers = _read_headers(directory, sorted(set(names.values())))
    if architecture(config) not in ARCHITECTURES:
        if headers is None:
            return _from_config(config)
        infos = [headers[name] for name in names if name in headers]
        tied = bool(config.get("tie_word_embeddings", False))
        return PlanModel(config, tensors_by_name(infos, tied=tied), False)
    model = list_tensors(config)
    _require_listed(model, names, headers)
    known = {tensor.info.name for tensor in model.tensors}
    extra = sorted(set(names) - known)
    if extra:
        note = f"{len(extra)} tensors of the index are not sent: {list_names(extra)}"
        model = replace(model, notes=(*model.notes, note))
    return PlanModel(config, model, True)


def _require_listed(
    model: ModelTensors, names: Mapping[str, str], headers: Mapping[str, TensorInfo] | None
) -> None:
    missing = [tensor.info.name for tensor in model.tensors if tensor.info.name not in names]
    if missing:
        raise ConfigurationError(
            f"the index lacks {len(missing)} tensors of this config.json: {list_names(missing)}",
            tensor=missing[0],
        )
    for tensor in model.tensors if headers is not None else ():
        found = (headers or {}).get(tensor.info.name)
        if found is not None and found.shape != tensor.info.shape:
            raise ConfigurationError(
                f"the checkpoint has shape {list(found.shape)} where config.json gives "
                f"{list(tensor.info.shape)}",
                tensor=tensor.info.name,
            )


def _read_headers(directory: Path, files: list[str]) -> dict[str, TensorInfo] | None:
    """Return the tensors of safetensors files, from their headers; `None` unless all files are there."""
    paths = [directory / name for name in files]
    if not all(path.is_file() for path in paths):
        return None
    found: dict[str, TensorInfo] = {}
    for path in paths:
        for name, entry in _read_header(path).items():
            if name != "__metadata__":
                found[name] = _entry(path, name, entry)
    return found


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER:
            raise ConfigurationError(f"{path} is no safetensors file: its header has {size} bytes")
        try:
            header = json.loads(file.read(size))
        except ValueError as error:
            raise ConfigurationError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} is no safetensors file: its header is no object")
    return header


def _entry(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        start, end = entry["data_offsets"]
        return TensorInfo(name, shape, (end - start) // max(prod(shape), 1))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} has an odd entry: {error!r}", tensor=name) from error


def _transformers_tensors(config: Mapping[str, Any]) -> list[TensorInfo]:
    """Return the tensors of a checkpoint of this model, from transformers' own model on the meta device."""
    name = architecture(config)
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ConfigurationError(
            f"no rules for {name} (known: {', '.join(ARCHITECTURES)}); for others its tensors are listed by "
            "transformers: pip install 'weightsync[demo]', or give an index with its safetensors files"
        ) from error
    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        made = AutoConfig.for_model(config["model_type"], **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"no rules for {name} (known: {', '.join(ARCHITECTURES)}), and transformers does not make it: "
            f"{error!s:.{_MAX_REASON}}"
        ) from error
    owned = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}  # tied ones once
    state = {key: tensor for key, tensor in model.state_dict().items() if key in owned}
    itemsize = _itemsize(config)
    return [
        TensorInfo(key, tuple(tensor.shape), itemsize if tensor.is_floating_point() else tensor.itemsize)
        for key, tensor in revert_weight_conversion(model, state).items()
    ]


def _itemsize(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dtype_from_name(name).itemsize
