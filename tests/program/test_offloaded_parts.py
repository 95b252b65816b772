"""A part that lies elsewhere than the mesh stays the tensor that it is: states of offloaded slots show them."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fnaccel._torch import laid_out_as


def laid_out():
    mesh = init_device_mesh("cpu", (2,))
    like = torch.distributed.tensor.zeros(6, 3, device_mesh=mesh, placements=[Shard(0)])
    mesh._device_type = "meta"  # an accelerator's, while the parts of `offload=True` are on the host
    part = torch.zeros(3, 3)
    shown = laid_out_as(like, part)
    part.fill_(2.0)
    return shown.to_local().device.type, float(shown.to_local().sum()), tuple(shown.shape)


def test_a_part_on_the_host_is_no_copy(pools):
    assert pools.run(2, laid_out) == [("cpu", 18.0, (6, 3))] * 2
