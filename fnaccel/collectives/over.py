"""The ranks of a collective and the device of its buffers: the meaning of `over=` and `world=`.

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
"""Values of `over=`: None for the whole world, one axis of a mesh, or a process group."""


@attrs.frozen
class Scope:
    """The ranks that take part: their number, and this rank among them. `group` None is the world."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = attrs.field(eq=False, repr=False)

    @functools.cached_property
    def backends(self) -> str:
        """The backend of each device type: `"cpu:gloo,cuda:nccl"`."""
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
        """The device of the few bytes of a signature: the CPU if possible, which waits for no kernel."""
        return self.carrier(_CPU)


_CPU = torch.device("cpu")


def scope(over: object, world: World | None, where: str) -> Scope:
    """The scope of one collective.

    Raises:
        NoWorldError: `over` is None and no world was started.
        ArgumentError: `over` is something else, or a group that this rank is not in.
    """
    if over is None:
        joined = current(world)
        return Scope(joined.size, joined.rank, joined.groups.calls)
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
    joined = world or find_current()
    if joined is None or group is not dist.group.WORLD:
        return group
    return joined.groups.calls


def carrier_of(where: Scope, leaves: Sequence[torch.Tensor]) -> torch.device:
    """The one device on which all of `leaves` are communicated: an accelerator if one leaf is on it."""
    chosen = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), _CPU)
    return where.carrier(chosen)
