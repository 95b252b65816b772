"""The private names of torch for a process group that does not communicate."""

from __future__ import annotations

import torch.distributed as dist


def begin_fake_group(rank: int, size: int) -> None:
    """Begin a process group whose collectives return at once, with wrong values. (2.13)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
