"""`SamePosition`: all ranks train on the same batch, and gather the same weights.

They compare in the all-reduce that each step makes.

A loop written by hand may skip a batch on one rank. From then on each update would mix rows of two batches.
`same_rows.py` compares the contents of one batch between ranks that share its rows.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from fnaccel.collectives import gather_objects
from fnaccel.errors import RankMismatchError
from fnaccel.state import Position
from fnaccel.texts import first_of
from fnaccel.world.host_copy import HostCopy
from fnaccel.world.mesh import Mesh

_CODE_MODULUS = 1_048_573  # a prime: squares of 8,192 ranks add up exactly. Codes are equal modulo it


def same_position(mesh: Mesh, told: deque[str]) -> SamePosition | None:
    """The comparison for the ranks that share the totals of a step. None on a single rank."""
    group = mesh.group("totals")
    return None if group is None else SamePosition(told, compares=mesh.world.backend != "fake")


class SamePosition:
    """Compares the positions of the batches of one step between ranks.

    Each rank adds a code of its position and the square of the code to the totals of the step. Squares of n
    equal numbers add up to the square of their sum divided by n. Squares of different numbers add up to more.
    So all ranks find a difference, and find it in the same step.

    Args:
        told: what this rank has done in the step that all ranks have to do: the weights that it has gathered.
        compares: False in a simulated world, whose collectives move nothing: ranks ask, and hear no answer.
    """

    __slots__ = ("_compares", "_differ", "_group", "_late", "_position", "_told")

    def __init__(self, told: deque[str], *, compares: bool = True) -> None:
        self._compares = compares
        self._group: Any = None
        self._told = told
        self._position: Position | None = None
        self._differ = False
        self._late: HostCopy | None = None

    def begin(self, position: Position | None, group: dist.ProcessGroup | None) -> None:
        """Begin a step, after the comparison of the step before.

        Args:
            position: the position of this rank's batch. None if it is no `fa.data.Batch`.
            group: the ranks that share the all-reduce of this step. None if this rank is alone.

        Raises:
            RankMismatchError: in the step before the ranks had batches of different positions.
        """
        if self._late is not None:
            sums, self._late = self._late.read(), None
            self._compare(sums)
        self.check()
        self._group = group
        self._position = position
        self._told.clear()

    @property
    def numbers(self) -> tuple[float, float]:
        """The numbers of this rank, which ranks sum."""
        position = self._position
        at = 0 if position is None else 1 + position.epoch * 8_191 + position.samples
        code = (at + zlib.crc32("\n".join(self._told).encode())) % _CODE_MODULUS
        return float(code), float(code * code)

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:  # noqa: ARG002 - for others
        """Take the sums over all ranks, of shape `[2]`. Those on an accelerator are read in the next step."""
        if sums is None or not self._compares:
            return
        if sums.device.type == "cpu":
            self._compare(sums)
            return
        self._late = HostCopy(sums)

    def _compare(self, sums: torch.Tensor) -> None:
        total, squares = map(int, sums.tolist())
        self._differ = squares * self._group.size() != total * total

    def check(self) -> None:
        """Raise on every rank if ranks are known to differ.

        Raises:
            RankMismatchError: see above. Names the position of each rank, or the weights that it gathered.
        """
        if not self._differ:
            return
        self._differ = False
        position = self._position
        text = (
            "a batch without a position"
            if position is None
            else f"epoch {position.epoch}, sample {position.samples}"
        )
        listed = gather_objects((dist.get_rank(), text), over=self._group)
        if len({at for _, at in listed}) == 1:
            orders = gather_objects((dist.get_rank(), list(self._told)), over=self._group)
            raise RankMismatchError(
                "ranks use different layers, and would compute with parts of different weights: "
                + "; ".join(
                    f"rank {rank} {first_of(order)}" for rank, order in _from_first_difference(orders)
                ),
                where="the loss function under fsdp()",
                fix="call the same layers on every rank: draw them with info.key, which is equal on all; "
                "or fa.ddp(), whose ranks may differ",
            )
        raise RankMismatchError(
            f"ranks have different batches: {'; '.join(f'rank {rank} is at {at}' for rank, at in listed)}",
            where="train_step(state, batch)",
            fix="take and skip the same batches on every rank, or let fa.scan(train_step, state, shards) run",
        )


def _from_first_difference(orders: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """What each rank has done from the first difference on."""
    steps = zip(*(told for _, told in orders), strict=False)
    shortest = min(len(told) for _, told in orders)
    same = next((number for number, step in enumerate(steps) if len(set(step)) > 1), shortest)
    return [(rank, told[same:] or ["nothing more"]) for rank, told in orders]
