"""Items as one file of `torch.save`, for libraries that read no safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fnaccel.checkpoint.disk import durable
from fnaccel.checkpoint.format.items import Item
from fnaccel.checkpoint.format.safetensors import Progress


def write_torch_file(path: Path, items: Sequence[Item], progress: Progress | None = None) -> None:
    """Write a dict of tensors, and wait until the device holds it. All of its tensors are in memory.

    Raises:
        OSError: the file can't be written.
        CheckpointError: a tensor can't be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for item in items:
        blocks = list(item.blocks())
        whole = (
            torch.cat([block.reshape(-1) for block in blocks]) if blocks else torch.empty(0, dtype=item.dtype)
        )
        whole = whole.reshape(item.shape)
        tensors |= dict.fromkeys((item.name, *item.also), whole)  # one storage
        if progress is not None:
            progress(item.nbytes)
    save_object(path, tensors)


def save_object(path: Path, value: object) -> None:
    """Write a value with `torch.save`, and wait until the device holds it."""
    with path.open("xb") as file:
        torch.save(value, file)
        file.flush()
        durable.sync(file.fileno())
