"""What stages share: weights that several use, and buffers of which all have a copy."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.collectives import gather_objects
from fnaccel.extend import Built, CapabilityError, Mesh
from fnaccel.strategies.pipeline.owned import AXIS


class SharedWeights:
    """Weights that several stages use, such as that of an embedding and of the head that is tied to it.

    The first stage owns it: its optimizer changes it, and states show it there. Other stages have a copy,
    whose gradient they send to the owner, and get its new value after each update.

    Args:
        built: the modules.
        users: by canonical name, the ranks along the axis that use the parameter. The first one owns it.
        mesh: the ranks.
    """

    def __init__(self, built: Built, users: Mapping[str, tuple[int, ...]], mesh: Mesh) -> None:
        borrowed = {name: copy for copy, name in built.copies.items()}
        along = mesh[AXIS]
        self._rank, self._group = along.rank, along.group
        own: dict[str, Any] = dict(built.host.target.named_parameters(remove_duplicate=False))  # pyright: ignore
        self._pairs: list[tuple[Any, tuple[int, ...], int]] = []
        self._everywhere: list[Any] = []
        for tag, (name, ranks) in enumerate(users.items(), start=1):
            if not own[name].dim():
                self._everywhere.append(own[name])
            elif len(ranks) > 1 and along.rank in ranks:
                self._pairs.append((own[borrowed.get(name, name)], ranks, tag))

    def add_gradients(self) -> None:
        """Add the gradients of all users on the owner."""
        for param, ranks, tag in self._pairs:
            if not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = _torch.local_of(param.grad)
            if self._rank != ranks[0]:
                dist.send(grad.contiguous(), group=self._group, group_dst=ranks[0], tag=tag)
                param.grad = None
                continue
            for rank in ranks[1:]:
                other = torch.empty_like(grad)
                dist.recv(other, group=self._group, group_src=rank, tag=tag)
                grad += other
        trained = [param for param in self._everywhere if param.requires_grad]
        if trained:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            flat = torch.stack([grad.double() for grad in grads])
            dist.all_reduce(flat, group=self._group)
            for param, value in zip(trained, flat, strict=True):
                param.grad = value.to(param.dtype)

    @torch.no_grad()
    def send_values(self) -> None:
        """Send the owner's value to the other users."""
        for param, ranks, tag in self._pairs:
            value = _torch.local_of(param.detach())
            if self._rank == ranks[0]:
                for rank in ranks[1:]:
                    dist.send(value.contiguous(), group=self._group, group_dst=rank, tag=tag)
            else:
                got = torch.empty_like(value, memory_format=torch.contiguous_format)
                dist.recv(got, group=self._group, group_src=ranks[0], tag=tag)
                value.copy_(got)


class StageBuffers:
    """Buffers that are saved, such as running statistics: all ranks take them from the stage that moves them.

    Args:
        built: the modules.
        homes: by name, the rank along the axis.
        mesh: the ranks.
        moved: the names of those that moved in a pass, and whether it was that of their stage.
    """

    def __init__(
        self, built: Built, homes: Mapping[str, int], mesh: Mesh, moved: Set[tuple[str, bool]]
    ) -> None:
        transient = set(_torch.transient_buffers(built.modules))
        self._built = built
        self._homes = {name: rank for name, rank in homes.items() if name not in transient}
        self._group: Any = mesh.group(AXIS)
        self._moved = moved
        self._checks = 2  # the updates after which stages compare

    def share(self) -> None:
        """Broadcast them: one broadcast for each stage that has some.

        Raises:
            CapabilityError: another stage than its own moved one. Raised on all of them.
        """
        if not self._homes:
            return
        if self._checks:
            self._checks -= 1
            self._check()
        now = dict(self._built.named("buffers"))
        for rank in sorted(set(self._homes.values())):
            own = [now[name] for name, home in self._homes.items() if home == rank and name in now]
            if not own:
                continue
            with torch.no_grad():
                own.sort(
                    key=lambda tensor: -tensor.itemsize
                )  # so that each part begins at a multiple of its size
                flat = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in own])
                dist.broadcast(flat, group=self._group, group_src=rank)
                for tensor, part in zip(own, flat.split([x.nbytes for x in own]), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _check(self) -> None:
        moved = set[tuple[str, bool]]().union(*gather_objects(set(self._moved), over=self._group))
        strays = sorted(name for name, at_home in moved if not at_home and (name, True) not in moved)
        if strays:
            raise CapabilityError(
                f"the buffer {strays[0]} is on rank {self._homes.get(strays[0], 0)} of pp, and another stage "
                "moves it",
                where="the model's forward under fa.pipeline()",
                fix="register it in a module of the stage that moves it: after the blocks, or in the head",
            )
