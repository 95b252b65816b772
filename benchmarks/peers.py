"""Accelerate and Lightning Fabric inside ranks that have a process group already."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


def _announce() -> None:
    """Say in the environment what a launcher would have said: it is all that the peers look at."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip


def accelerate(**options: Any) -> Any:
    """An `Accelerator` that has really found all ranks."""
    from accelerate import Accelerator

    _announce()
    found = Accelerator(cpu=True, **options)
    if found.num_processes != dist.get_world_size():
        raise SystemExit(
            f"Accelerate runs on {found.num_processes} ranks, and there are {dist.get_world_size()}"
        )
    return found


def fabric() -> Any:
    """A launched `Fabric`, likewise."""
    from lightning_fabric import Fabric

    _announce()
    found = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    found.launch()
    if found.world_size != dist.get_world_size():
        raise SystemExit(f"Fabric runs on {found.world_size} ranks, and there are {dist.get_world_size()}")
    return found
