"""inductor may fuse what makes a factor into a list kernel only if one part of that kernel reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._inductor.scheduler import ForeachKernelSchedulerNode

from fnaccel import _torch


def part(*reads):
    return SimpleNamespace(read_writes=SimpleNamespace(reads=[SimpleNamespace(name=name) for name in reads]))


@pytest.fixture
def mended(monkeypatch):
    monkeypatch.setattr(
        ForeachKernelSchedulerNode,
        "get_consumer_subnode_for",
        ForeachKernelSchedulerNode.get_consumer_subnode_for,
    )
    _torch.mend_foreach_fusion.__wrapped__()


@pytest.mark.usefixtures("mended")
def test_only_the_one_reader_takes_its_producer():
    first, second = part("grad0", "factor"), part("grad1", "factor", "own")
    node = ForeachKernelSchedulerNode.__new__(ForeachKernelSchedulerNode)
    node.snodes = [first, second]
    node.read_to_node = {"grad0": first, "grad1": second, "factor": second, "own": second}

    def producer(name):
        return SimpleNamespace(get_outputs=lambda: [SimpleNamespace(get_name=lambda: name)])

    assert node.get_consumer_subnode_for(producer("own")) is second
    assert node.get_consumer_subnode_for(producer("other")) is None
    assert node.get_consumer_subnode_for(producer("factor")) is None
