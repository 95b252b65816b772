from __future__ import annotations

import pytest
import torch

from fnaccel.data import Batch, placement
from fnaccel.data.placement import place
from fnaccel.state import Position


def batches():
    for epoch in range(2):
        yield Batch(data={"x": torch.ones(2), "name": "a"}, valid=2, rows=2, position=Position(epoch))


def test_the_cpu_costs_nothing():
    source = batches()
    assert place(source, torch.device("cpu")) is source


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_copies_are_begun_ahead(monkeypatch, depth):
    events = []
    monkeypatch.setattr(placement, "_begin", lambda batch, *_: events.append("begin") or (batch, None))
    monkeypatch.setattr(placement, "_await", lambda batch, *_: events.append("use") or batch)
    monkeypatch.setattr(placement.torch, "Stream", lambda device: None)
    source = [next(batches()) for _ in range(5)]
    assert list(place(iter(source), torch.device("cuda"), prefetch=depth)) == source
    assert events == ["begin"] * depth + ["begin", "use"] * (5 - depth) + ["use"] * depth


def test_tensors_move_and_the_rest_stays():
    placed = list(place(batches(), torch.device("meta")))
    assert [batch.position.epoch for batch in placed] == [0, 1]
    assert [batch.data["x"].device.type for batch in placed] == ["meta", "meta"]
    assert placed[0].data["name"] == "a"
