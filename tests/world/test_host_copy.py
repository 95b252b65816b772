"""`HostCopy`: an event stands behind the copy of a tensor on an accelerator. Tests of GPUs read real ones."""

from __future__ import annotations

import torch

from fnaccel.world.host_copy import HostCopy


class OnDevice(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    device = torch.device("cuda")


def test_it_waits_for_the_copy(monkeypatch):
    done = []

    class Event:
        def __init__(self, device):
            done.append(device)

        def record(self):
            done.append("record")

        def query(self):
            return "synchronize" in done

        def synchronize(self):
            done.append("synchronize")

    real = torch.empty_like
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: real(torch.zeros(3)))
    tensor = torch.arange(3.0).as_subclass(OnDevice)
    copy = HostCopy(tensor)
    assert done == ["cuda", "record"]
    assert not copy.arrived
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
    assert done[-1] == "synchronize"
    assert copy.arrived


def test_a_tensor_of_the_host_is_there():
    tensor = torch.ones(2)
    copy = HostCopy(tensor)
    assert copy.arrived
    assert copy.read() is tensor
