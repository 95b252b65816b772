"""The private names of torch for process groups: one that does not communicate, their limits, their end."""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import sys
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fnaccel._torch import forget_meshes

_layouts: tuple[weakref.ref[Any], dict[Any, Any]] | None = None
_limit: timedelta | None = None


def begin_fake_group(rank: int, size: int) -> None:
    """Begin a process group whose collectives return at once, with wrong values. (2.13)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def layouts_on(group: Any) -> dict[Any, Any]:
    """The layouts of meshes on a process group, by their degrees. None yet on a new one."""
    global _layouts
    if _layouts is None or _layouts[0]() is not group:
        _layouts = weakref.ref(group), {}
        forget_meshes()
    return _layouts[1]


def limit_collectives(limit: timedelta | None = None) -> None:
    """Give collectives of all groups of this process one limit: the last one, if none is given. (2.9 to 2.13)

    torch gives each new group its own default, of 30 minutes on gloo and 10 on NCCL.
    """
    global _limit
    limit = _limit = limit or _limit
    if limit is None:
        return
    for group in list(c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):  # this rank is in it
            c10d._set_pg_timeout(limit, group)


def let_go_of_groups() -> None:
    """Take the groups that end from where they would stay, with the port of their store. (2.13)

    Functions of torch.distributed.nn have the group that ran at its import as a default: None is the group of
    a call. A mesh has its groups, and a train step or a tensor of the user's may keep the mesh.
    """
    global _layouts, _limit
    _limit = None
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in () if module is None else vars(module).values():
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(None if isinstance(x, dist.ProcessGroup) else x for x in defaults)
    for layout in () if _layouts is None else _layouts[1].values():
        for mesh in (layout.device, layout.shown):
            getattr(mesh, "_pg_registry", {}).clear()
    _layouts = None
