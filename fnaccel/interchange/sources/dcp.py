"""Directories of `torch.distributed.checkpoint`: `.metadata` and `__0_0.distcp`, read block by block.

No process group is needed. The metadata is a pickle, so reading it can run code: see `trusting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint.format.boxes import Box
from fnaccel.checkpoint.format.found import Found, Source, damaged
from fnaccel.interchange.sources.trusting import require_trust
from fnaccel.tree import Tree

_MODELS = ("model", "state_dict", "model_state_dict")
_SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")


def open_dcp(path: Path, *, trust: bool) -> Source:
    """A directory that `torch.distributed.checkpoint.save` wrote.

    Raises:
        CheckpointError: it is not trusted, damaged, or holds no tensors.
    """
    require_trust("dcp", path, trust=trust)
    weights: dict[tuple[str, ...], Found] = {}
    slots: dict[str, dict[str, Found]] = {}
    for keys, tensor in _tensors(path):
        moment = _moment(keys)
        if moment is not None:
            slots.setdefault(moment[0], {})[moment[1]] = tensor
        elif not any(part.split(".")[0] == "param_groups" for part in keys):
            weights[keys] = tensor
    counts = {name: entry["step"] for name, entry in slots.items() if "step" in entry}
    return Source(format="dcp", path=path, weights=_named(weights), slots=slots, counts=counts)


def _tensors(path: Path) -> Iterator[tuple[tuple[str, ...], Found]]:
    """Each tensor, and its keys in the saved nested dicts."""
    # imports torch.distributed.tensor: 0.6 s that other formats need not pay
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415

    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
        stored = dict(metadata.state_dict_metadata)
        reader.set_up_storage_reader(metadata, True)
    except Exception as error:  # a damaged pickle raises anything
        raise damaged(f".metadata can't be read: {type(error).__name__}: {error}", path) from error
    places: Mapping[str, Any] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for key, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata):
            keys = tuple(map(str, places.get(key, (key,))))
            yield keys, _found(reader, key, entry, path)


def _found(reader: object, key: str, entry: Tree, path: Path) -> Found:
    def read(box: Box, out: torch.Tensor) -> None:
        if not box.numel:
            return
        try:
            _read(reader, key, entry, box, out)
        except (OSError, RuntimeError, AssertionError, EOFError, KeyError, ValueError) as error:
            raise damaged(f"{key} can't be read: {type(error).__name__}: {error}", path) from error

    return Found(entry.properties.dtype, tuple(entry.size), read, at_once=True)


def _read(reader: Any, key: str, entry: Tree, box: Box, out: torch.Tensor) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - see above
    from torch.distributed.checkpoint.planner import LoadPlan  # noqa: PLC0415 - see above
    from torch.distributed.checkpoint.planner_helpers import (  # noqa: PLC0415 - see above
        create_read_items_for_chunk_list,
    )

    chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
    items = create_read_items_for_chunk_list(key, entry, [chunk])
    covered = sum(torch.Size(item.lengths).numel() for item in items)
    if covered != box.numel:
        raise ValueError(f"{covered} of {box.numel} elements are stored")
    reader.read_data(LoadPlan(items), _Into(out)).wait()


@attrs.frozen(eq=False)
class _Into:
    """The part of a load planner that a storage reader calls: it places blocks in one tensor."""

    out: torch.Tensor

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        view = self.out
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, item: object, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave a view."""


def _moment(keys: tuple[str, ...]) -> tuple[str, str] | None:
    """(parameter, slot) for keys such as `optim/state/0.weight/exp_avg`, or None for a weight."""
    if "state" in keys[:-2]:
        at = keys.index("state")
        return ".".join(keys[at + 1 : -1]), keys[-1]
    # flattened: optim/state.0.weight.exp_avg
    name, _, slot = keys[-1].rpartition(".")
    _, flat, parameter = f".{name}".partition(".state.")
    return (parameter, slot) if flat and slot in _SLOTS else None


def _named(weights: Mapping[tuple[str, ...], Found]) -> dict[str, Found]:
    """Names of weights without the keys of the dicts around the model's."""
    for head in _MODELS:
        inside = {keys[1:]: tensor for keys, tensor in weights.items() if keys[0] == head and keys[1:]}
        if inside:
            return {".".join(keys): tensor for keys, tensor in inside.items()}
    shared = 0
    while (
        weights and len({keys[: shared + 1] for keys in weights}) == 1 and min(map(len, weights)) > shared + 1
    ):
        shared += 1
    return {".".join(keys[shared:]): tensor for keys, tensor in weights.items()}
