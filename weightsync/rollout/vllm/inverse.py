"""Reading Hugging Face tensors back out of the parameters that vLLM made of them.

What the loader wrote where is known from the trial: a tensor that was only copied, into whatever regions of
whatever fused parameters, is put together again. What was cast, transformed, sharded or packed is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from weightsync.rollout.vllm.coverage import CoverageReport
from weightsync.rollout.vllm.regions import Cover, Region
from weightsync.rollout.vllm.tracer import Write
from weightsync.tensors import TensorSpec, dtype_from_name


def invert(
    report: CoverageReport, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the manifest that can be read back, under their own names.

    Args:
        report: of the manifest that was loaded last.
        parameters: the model's, as they are stored now.
    """
    copies: dict[str, list[Write]] = defaultdict(list)
    changed: set[str] = set()
    for write in report.writes:
        same = write.read is not None and write.source_dtype == write.target_dtype
        if not same or len(write.sources) != 1 or write.target in report.reworked:
            changed |= write.sources
        for name in write.sources:
            copies[name].append(write)
    for spec in report.manifest.tensors if report.manifest is not None else ():
        if spec.name in copies and spec.name not in changed:
            tensor = _put_together(spec, copies[spec.name], parameters, report.shapes)
            if tensor is not None:
                yield spec.name, tensor


def _put_together(
    spec: TensorSpec,
    writes: list[Write],
    parameters: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> torch.Tensor | None:
    cover, dtype = Cover(), dtype_from_name(spec.dtype)
    whole: torch.Tensor | None = None
    for write in writes:
        parameter = parameters.get(write.target)
        if parameter is None or write.read is None or not _is_as_loaded(parameter, write, shapes):
            return None
        if whole is None:
            whole = torch.empty(spec.shape, dtype=dtype, device=parameter.device)
        _view(whole, write.read).copy_(_view(parameter.detach(), write.into))
        cover.add(write.read)
    return whole if whole is not None and cover.size() == whole.numel() else None


def _is_as_loaded(parameter: torch.Tensor, write: Write, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    shape = shapes.get(write.target)
    return (
        tuple(parameter.shape) == shape
        and parameter.dtype == write.target_dtype
        and parameter.is_contiguous()
    )


def _view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor.as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)
