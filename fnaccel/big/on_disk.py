"""Tensors written to a folder, to be read from it in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fnaccel.errors import ArgumentError, CheckpointError
from fnaccel.texts import size_of

_SHARD = 1 << 30


@attrs.frozen(eq=False)
class ToWrite:
    """A tensor for the disk: its bytes, and a function that makes it when it is written."""

    nbytes: int
    make: Callable[[], torch.Tensor]


def write_folder(tensors: Mapping[str, ToWrite], folder: Path | None, where: str) -> dict[str, torch.Tensor]:
    """Write tensors to safetensors files of about 1 GiB, and map them.

    Files of an earlier run are replaced. Mapped tensors stay valid if the folder is deleted.

    Args:
        tensors: by name.
        folder: made if it does not exist.
        where: the location in error messages.

    Returns:
        The same tensors, mapped.

    Raises:
        ArgumentError: no folder was given, or its disk lacks the space. Nothing was written.
        CheckpointError: writing failed. The new files are deleted.
    """
    if not tensors:
        return {}
    total = sum(tensor.nbytes for tensor in tensors.values())
    if folder is None:
        raise ArgumentError(
            f"{len(tensors)} tensors ({size_of(total)}) go to the disk, and there is no folder for them",
            where=where,
            fix='folder="offload", or load a checkpoint of safetensors, which is used in place',
        )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ArgumentError(
            f"{size_of(total)} go to {folder}, which has {size_of(free)} left",
            where=where,
            fix="another folder=, or a map that leaves more on the CPU",
        )
    written: list[Path] = []
    mapped: dict[str, torch.Tensor] = {}
    try:
        for number, names in enumerate(_shards(tensors)):
            file = folder / f"offloaded-{number:05}.safetensors"
            part = folder / f"{file.stem}.{os.getpid()}.partial"
            written += [part, file]
            save_file({name: _plain(tensors[name].make()) for name in names}, part)
            with safe_open(part, "pt") as handle:  # before another rank may write the same name
                mapped |= {name: handle.get_tensor(name) for name in names}
            part.replace(file)  # a file that another process maps stays as it is
    except (OSError, SafetensorError) as error:
        for file in written:
            file.unlink(missing_ok=True)
        raise CheckpointError(
            f"{folder} can't be written: {error}", where=where, fix="another folder=. Nothing was changed"
        ) from error
    return mapped


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Values of its own: safetensors takes no tensor that shares memory with another."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _shards(tensors: Mapping[str, ToWrite]) -> Iterable[list[str]]:
    names: list[str] = []
    count = 0
    for name, tensor in tensors.items():
        if names and count + tensor.nbytes > _SHARD:
            yield names
            names, count = [], 0
        names.append(name)
        count += tensor.nbytes
    yield names
