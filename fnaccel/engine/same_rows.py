"""Check that ranks which share the rows of a batch got the same rows: a checksum of each epoch's first batch.

Only ranks along `dp_replicate` and `dp_shard` read rows of their own. Along every other axis, ranks compute
on the same rows. If a loop written by hand or a random augmentation gives them different rows, training goes
wrong without an error.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from fnaccel import tree
from fnaccel.collectives import gather_objects
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.errors import RankMismatchError
from fnaccel.texts import ranks_of
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh

_SHOWN = 60  # characters of the shapes that a message shows for each group of ranks
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameRows:
    """Compares the batches of one train step between the ranks that must read the same rows.

    Args:
        mesh: the mesh of the train step. Some ranks share their rows.
    """

    __slots__ = ("_compared", "_mesh")

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._compared = -1

    def reset(self) -> None:
        """Compare the next batch too, whatever its epoch is: the state was restored."""
        self._compared = -1

    def check(self, epoch: int, micro_batches: MicroBatches) -> None:
        """Compare a batch if it is the first one of its epoch: one small exchange between all ranks.

        Args:
            epoch: the epoch of the state. It stays the same if batches have no position.
            micro_batches: those of this rank.

        Raises:
            RankMismatchError: ranks that must read the same rows have different ones. Raised on every rank.
        """
        if self._compared == epoch:
            return
        datas = [part.data for part in micro_batches]
        local = (self._mesh.batch_rank, checksum(datas), _shapes(datas))
        parts: dict[int, dict[tuple[str, str], list[int]]] = {}
        for rank, (part, digest, shapes) in enumerate(gather_objects(local, world=self._mesh.world)):
            parts.setdefault(part, {}).setdefault((digest, shapes), []).append(rank)
        for part, versions in sorted(parts.items()):
            if len(versions) > 1:
                raise _different(part, versions, epoch)
        self._compared = epoch


def _different(part: int, versions: dict[tuple[str, str], list[int]], epoch: int) -> RankMismatchError:
    listed = "; ".join(
        f"{ranks_of(ranks)} got {shapes}, checksum {digest}" for (digest, shapes), ranks in versions.items()
    )
    return RankMismatchError(
        f"ranks that share part {part} of each batch got different rows: {listed}",
        where=f"train_step(state, batch), the first batch of epoch {epoch}",
        fix="read with fa.scan, or with fa.shard(loader).on(train_step.mesh) in a loop of your own; if the "
        "data is random, seed it alike on these ranks",
    )


def checksum(data: Tree) -> str:
    """A checksum of the paths of a tree's leaves, and of its tensors' shapes, dtypes and bytes.

    Tensors on the CPU are read as bytes. Those on another device are reduced there, and the host reads all
    sums at once. Of other leaves only numbers and text count.
    """
    text: list[str] = []
    sums: list[torch.Tensor] = []
    total = 0
    for path, leaf in tree.items(data):
        text.append(path)
        if not isinstance(leaf, torch.Tensor):
            plain = isinstance(leaf, bool | int | float | str | bytes)
            text.append(repr(leaf) if plain else type(leaf).__name__)
            continue
        text.append(f"{list(leaf.shape)} {leaf.dtype}")
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            continue
        values = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
        if leaf.device.type == "cpu":
            content: Any = values.contiguous().view(torch.uint8).numpy()
            total = zlib.crc32(content, total)
        else:
            sums.append(sum_on_device(values))
    if sums:
        text += map(str, torch.stack([value.to(sums[0].device) for value in sums]).tolist())
    return f"{zlib.crc32(' '.join(text).encode(), total):08x}"


def sum_on_device(values: torch.Tensor) -> torch.Tensor:
    """A checksum of the bits of a 1-d tensor: an int64 0-d tensor on its device, which the host has not read.

    Each element is multiplied by an odd number of its own, so that the order of elements counts.
    """
    if values.dtype.itemsize not in _INTEGERS:  # complex128
        values = torch.view_as_real(values).reshape(-1)
    bits = values.contiguous().view(_INTEGERS[values.dtype.itemsize]).long()
    places = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    return (bits * places).sum()


def _shapes(data: Tree) -> str:
    tensors: list[Any] = [leaf for leaf in tree.leaves(data) if isinstance(leaf, torch.Tensor)]
    text = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors) or "no tensor"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
