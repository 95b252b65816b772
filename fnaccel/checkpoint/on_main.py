"""`save_on_main`: one object to one file, from rank 0."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

from fnaccel import tree
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk import durable, placing
from fnaccel.checkpoint.format.items import check_items, of_tensors
from fnaccel.checkpoint.format.safetensors import widest_first, write_items
from fnaccel.checkpoint.format.torch_file import save_object
from fnaccel.errors import ArgumentError
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank_of
from fnaccel.world.paths import local_path
from fnaccel.world.world import World, current

_WHERE = "fa.checkpoint.save_on_main"


@every_rank_of("fa.checkpoint")
def save_on_main(
    value: Tree,
    path: str | os.PathLike[str],
    *,
    each_machine: bool = False,
    overwrite: bool = True,
    world: World | None = None,
) -> Path:
    """Write one object to one file, on rank 0. The file is there on all ranks when the call returns.

    Every rank calls it. Sharded tensors are gathered. The file appears when all of it is on the device.

    Args:
        value: anything that `torch.save` takes, or for a path with `.safetensors` a dict of tensors by name.
        path: the file.
        each_machine: write it once on each machine, for folders that machines do not share.
        overwrite: replace an earlier file.
        world: the world, if none was started in this context.

    Returns:
        The path.

    Raises:
        CheckpointError: it can't be written. Raised on all ranks, and an earlier file is as it was.
        ArgumentError: not a dict of tensors for safetensors.

    Example:
        >>> path = fa.checkpoint.save_on_main({"vocabulary": ["a", "b"]}, "vocabulary.pt")
        >>> torch.load(path)
        {'vocabulary': ['a', 'b']}
    """
    active, target = current(world), local_path(path, _WHERE)
    writes = active.is_local_main if each_machine else active.is_main

    def gathered(leaf: Any) -> Any:
        whole = tree.whole(leaf)
        return whole if writes else None  # the other ranks only take part in gathering

    whole = tree.map(gathered, value)

    def write() -> None:
        if not writes:
            return
        place = placing.check_free(target, overwrite=overwrite, where=_WHERE, file=True)
        durable.make_directory(place.parent, parents=True)
        staged = place.with_name(f".{place.name}.writing-{uuid.uuid4().hex[:12]}")
        try:
            _write(staged, place.suffix, whole)
            placing.commit_file(staged, place)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    together(active, _WHERE, write)
    return target


def _write(path: Path, suffix: str, value: Tree) -> None:
    if suffix != ".safetensors":
        save_object(path, value)
        return
    if not isinstance(value, dict) or not all(isinstance(leaf, torch.Tensor) for leaf in value.values()):
        raise ArgumentError(
            "safetensors hold a dict of tensors by name, and this is another object",
            where=_WHERE,
            fix='give a path that ends in ".pt", or a dict of tensors',
        )
    items = of_tensors({str(name): leaf for name, leaf in value.items()}, None, keep=True)
    check_items(items, _WHERE)
    write_items(path, widest_first(items))
