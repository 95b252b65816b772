from __future__ import annotations

import torch

from fnaccel.data import Batch
from fnaccel.data.placement import place
from fnaccel.state import Position


def batches():
    for epoch in range(2):
        yield Batch(data={"x": torch.ones(2), "name": "a"}, valid=2, rows=2, position=Position(epoch))


def test_the_cpu_costs_nothing():
    source = batches()
    assert place(source, torch.device("cpu")) is source


def test_tensors_move_and_the_rest_stays():
    placed = list(place(batches(), torch.device("meta")))
    assert [batch.position.epoch for batch in placed] == [0, 1]
    assert [batch.data["x"].device.type for batch in placed] == ["meta", "meta"]
    assert placed[0].data["name"] == "a"
