"""Live storages are counted once each, as long as they live."""

from __future__ import annotations

import torch

from fnaccel.estimate import LiveStorages


def test_views_and_frees():
    with LiveStorages() as storages:
        first = torch.ones(1_000)
        view = first.view(10, 100)[2:]
        assert storages.live == 4_000
        del first
        assert storages.live == 4_000
        del view
        assert storages.live == 0
    assert storages.peak == 4_000


def test_resized_storages():
    """FSDP2 frees gathered parameters so, and no operation says so."""
    with LiveStorages() as storages:
        value = torch.ones(1_000)
        value.untyped_storage().resize_(0)
        assert storages.live == 0
        value.untyped_storage().resize_(4_000)
        assert storages.live == 4_000


def test_arguments_from_before():
    before = torch.ones(500)
    with LiveStorages() as storages:
        before.sum()
    assert storages.peak == 4
    with LiveStorages(arguments=True) as storages:
        before.sum()
    assert storages.peak == 2_004


def test_tensors_left_out_and_bytes_held():
    parameter = torch.empty(8, device="meta")
    with LiveStorages() as storages:
        storages.leave_out([parameter])
        storages.hold(100)
        result = parameter * 2
        assert storages.live == 132
        storages.hold(-100)
        parameter.mul_(2)
        assert (storages.live, storages.peak) == (32, 132)
    assert result.shape == (8,)
