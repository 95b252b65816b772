"""Checkpoints in folders that machines do not share: each machine holds what its own ranks need.

Every machine has a directory of its own under the same path, with a whole manifest. If several machines
hold a piece, the manifest of a machine names its own copy. So the directories of all machines, copied into
one, are an ordinary checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk.directory import Directory
from fnaccel.checkpoint.disk.publish import checkpoints
from fnaccel.checkpoint.format.boxes import Box, Part, is_sharded, overlap, parts_of
from fnaccel.checkpoint.format.manifest import Piece, Stored
from fnaccel.collectives import gather_objects
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import CheckpointError
from fnaccel.world.world import World


@attrs.frozen
class Machines:
    """The machine of each rank. One machine if all ranks see the same folder.

    Attributes:
        of: the number of the machine of each rank.
        rank: this rank.
    """

    of: tuple[int, ...]
    rank: int

    @classmethod
    def found(cls, world: World, *, apart: bool) -> Machines:
        """Those of a world. With `apart`, every rank calls it, and folders are not shared."""
        if not apart:
            return cls((0,) * world.size, world.rank)
        return cls(tuple(gather_objects(world.machine, world=world)), world.rank)

    @property
    def here(self) -> int:
        """The machine of this rank."""
        return self.of[self.rank]

    @property
    def several(self) -> bool:
        """Whether there are folders that some ranks do not see."""
        return len(set(self.of)) > 1

    def lead(self, rank: int | None = None) -> int:
        """The first rank of the machine of a rank. By default of this one."""
        return self.of.index(self.of[self.rank if rank is None else rank])

    @property
    def leads(self) -> bool:
        """Whether this rank makes the directory of its machine and writes the manifest."""
        return self.lead() == self.rank

    def first_of(self, ranks: Iterable[int]) -> bool:
        """Whether this rank is the first on its machine among some ranks, of which it is one."""
        return self.rank == min(other for other in ranks if self.of[other] == self.here)

    def parts_of(self, value: torch.Tensor) -> tuple[Part, ...]:
        """The blocks of a tensor on this rank. Of copies, one on each machine is written."""
        parts = parts_of(value, self.rank)
        if self.several:
            writes = self._writes(value, parts[0])
            parts = tuple(attrs.evolve(part, writes=writes) for part in parts)
        return parts

    def _writes(self, value: torch.Tensor, part: Part) -> bool:
        if isinstance(value, Remote):
            return part.writes if value.dim() else self.leads
        if not is_sharded(value):
            return self.leads
        spread: Any = value
        coordinate = spread.device_mesh.get_coordinate()
        if coordinate is None:
            return part.writes
        pairs = zip(spread.placements, coordinate, strict=True)
        holders = spread.device_mesh.mesh[
            tuple(slice(None) if placement.is_replicate() else at for placement, at in pairs)
        ]
        return self.first_of(holders.flatten().tolist())

    def own_copies(self, pieces: Iterable[tuple[int, Piece]]) -> tuple[Piece, ...]:
        """One of each piece of a tensor: this machine's, or else that of the first rank that wrote one.

        Args:
            pieces: (the rank that wrote it, the piece).
        """
        chosen: dict[Box, Piece] = {}
        for _, piece in sorted(pieces, key=lambda entry: (self.of[entry[0]] != self.here, entry[0])):
            chosen.setdefault(piece.box, piece)
        return tuple(chosen.values())


def common_steps(root: Path, world: World, where: str, steps: Sequence[int] | None = None) -> list[int]:
    """The steps under a root that every machine has, newest first. Every rank calls it.

    Args:
        root: the root on this machine.
        world: the ranks.
        where: the public function, for messages.
        steps: this machine's. By default those that are committed.
    """
    own = steps if steps is not None else [entry.step for entry in checkpoints(root)]
    everywhere = together(world, where, lambda: set(own) if world.is_local_main else None)
    present = [found for found in everywhere if found is not None]
    return sorted(set.intersection(*present), reverse=True)


def check_present(
    directory: Directory, wanted: Iterable[tuple[Stored, Box]], machine: int, where: str
) -> None:
    """Check that the pieces which this rank needs lie on this machine.

    Raises:
        CheckpointError: some lie on others. Lists them.
    """
    there: dict[str, bool] = {}
    missing: list[str] = []
    for stored, box in wanted:
        for piece in stored.pieces:
            if overlap(piece.box, box) is None:
                continue
            if piece.file not in there:
                there[piece.file] = directory.size_of(piece.file) is not None
            if not there[piece.file]:
                missing.append(f"{stored.path} {list(piece.box.offset)} in {piece.file}")
    if missing:
        more = f", and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"machine {machine} lacks {len(missing)} pieces that its ranks need: "
            f"{', '.join(missing[:5])}{more}",
            where=f"{where} of {directory.path}",
            fix="restore on the machines and with the layout that saved it; or copy the shard-* files of all "
            "machines into this directory, which any layout can restore",
        )
