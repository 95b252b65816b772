"""Which ranks a collective spans, and where its bytes travel: what `over=` and `world=` mean.

No data moves here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import ArgumentError
from fnaccel.world.mesh import MeshAxis
from fnaccel.world.world import World, current, find_current

Over = MeshAxis | dist.ProcessGroup | None
"""What `over=` takes: None for the whole world, one axis of a mesh, or a process group."""


@attrs.frozen
class Scope:
    """The ranks that take part: how many, and which of them this one is; `group` None is the world."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = attrs.field(eq=False, repr=False)

    @functools.cached_property
    def backends(self) -> str:
        """What carries which devices: `"cpu:gloo,cuda:nccl"`."""
        return str(dist.get_backend_config(self.group or dist.group.WORLD))

    def carrier(self, device: torch.device) -> torch.device:
        """The device on which a tensor of `device` is communicated."""
        if self.size == 1:
            return device
        if f"{device.type}:" in self.backends:
            return device
        # gloo alone can't carry an accelerator's tensors, nor nccl alone the CPU's
        if "cpu:" in self.backends:
            return _CPU
        return torch.device(self.backends.partition(":")[0], torch.accelerator.current_device_index())

    def signature_device(self) -> torch.device:
        """Where the few bytes of a signature travel: the CPU if it can, which waits for no kernel."""
        return self.carrier(_CPU)


_CPU = torch.device("cpu")


def scope(over: object, world: World | None, where: str) -> Scope:
    """The scope of one collective.

    Raises:
        NoWorldError: `over` is None and no world was started.
        ArgumentError: `over` is something else, or a group that this rank is not in.
    """
    if over is None:
        found = current(world)
        return Scope(found.size, found.rank, found.groups.calls)
    if isinstance(over, MeshAxis):
        return Scope(over.size, over.rank, _for_calls(over.group, world))
    if isinstance(over, dist.ProcessGroup):
        rank = dist.get_rank(over)
        if rank < 0:
            raise ArgumentError(
                "this rank is not part of the process group",
                where=f"{where}(over=...)",
                fix="call it on the ranks of the group only",
            )
        return Scope(dist.get_world_size(over), rank, _for_calls(over, world))
    raise ArgumentError(
        f"over={over!r} says no ranks",
        where=f"{where}(over=...)",
        fix="pass an axis of a mesh (train_step.mesh['dp_shard']), a process group, or nothing for the world",
    )


def _for_calls(group: dist.ProcessGroup | None, world: World | None) -> dist.ProcessGroup | None:
    """`group`, or the world's own group for calls in the place of the one in which train steps talk."""
    found = world or find_current()
    if found is None or group is not dist.group.WORLD:
        return group
    return found.groups.calls


def carrier_of(where: Scope, leaves: Sequence[torch.Tensor]) -> torch.device:
    """The one device on which all of `leaves` are communicated; an accelerator's, if one is on it."""
    chosen = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), _CPU)
    return where.carrier(chosen)
