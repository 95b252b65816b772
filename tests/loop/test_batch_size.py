"""The search for a batch that fits."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current


def fits_up_to(limit, tried, error=None):
    def attempt(size):
        tried.append(size)
        if size > limit:
            raise error or torch.OutOfMemoryError("CUDA out of memory")
        return f"ran {size}"

    return attempt


def test_sizes_shrink_by_a_tenth_rounded_down():
    tried = []
    with fa.start():
        assert fa.fit_batch_size(fits_up_to(85, tried), 128) == (82, "ran 82")
        assert tried == [128, 115, 103, 92, 82]
        tried.clear()
        assert fa.fit_batch_size(fits_up_to(9, tried), 64, shrink=0.5)[0] == 8
        assert tried == [64, 32, 16, 8]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_other_ways_to_run_out(error):
    with fa.start():
        assert fa.fit_batch_size(fits_up_to(4, [], error), 8, shrink=0.5)[0] == 4


def test_other_errors_pass_through():
    with fa.start(), pytest.raises(ZeroDivisionError):
        fa.fit_batch_size(lambda size: 1 / 0, 8)


def test_nothing_fits():
    with fa.start(), pytest.raises(errors.ArgumentError, match="not even a batch of one"):
        fa.fit_batch_size(fits_up_to(0, []), 8)


def search_together():
    limit = 100 if current().rank == 0 else 20
    return fa.fit_batch_size(fits_up_to(limit, []), 64, shrink=0.5)[0]


def test_ranks_agree_on_the_smallest(pools):
    assert pools.run(2, search_together) == [16, 16]
