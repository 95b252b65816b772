"""Fixtures of the whole suite: real ranks, forked once."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks share two cores

from collections.abc import Iterator

import pytest
import torch

from fnaccel.testing import RankPools

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Worlds of any size: `pools.run(2, fn, *args)` -> the results of both ranks."""
    with RankPools() as started:
        yield started
