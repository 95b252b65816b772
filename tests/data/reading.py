"""How the tests read: every rank after the other in one process, as ranks need no messages."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data as torch_data

from fnaccel.data import Batch, Shards, Window, open_epoch

CPU = torch.device("cpu")


def numbers(n: int) -> torch_data.TensorDataset:
    return torch_data.TensorDataset(torch.arange(n))


def read(shards: Shards, rank: int = 0, ranks: int = 1, **options: Any) -> list[Any]:
    return list(open_epoch(shards, rank=rank, ranks=ranks, device=CPU, **options))


def read_all(shards: Shards, ranks: int, **options: Any) -> list[list[Any]]:
    return [read(shards, rank, ranks, **options) for rank in range(ranks)]


def values(data: Any) -> list[int]:
    tensor = data if isinstance(data, torch.Tensor) else data[0]
    return tensor.tolist()


def counted(batch: Batch) -> list[int]:
    """The samples of a batch that count."""
    return values(batch.data)[: batch.valid]


def samples(per_rank: list[list[Batch]]) -> list[int]:
    """Every sample that counted, on all ranks, step by step."""
    return [one for step in zip(*per_rank, strict=True) for batch in step for one in counted(batch)]


def members(windows: list[Window]) -> list[Batch]:
    return [batch for window in windows for batch in window]
