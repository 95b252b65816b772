"""From a step's metrics to a tracker: order, scalars only, one record a step."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel.track import JsonlTracker, read_jsonl
from fnaccel.track.fetcher import Fetcher
from fnaccel.track.log import Log


class Kept:
    """A tracker that remembers what it was told."""

    def __init__(self):
        self.said = []

    def start(self, config):
        self.said.append(("start", dict(config)))

    def log(self, step, metrics):
        self.said.append((step, dict(metrics)))

    def finish(self):
        self.said.append("finish")


def arrived(fetcher, **options):
    return [(row.step, row.values) for row in fetcher.arrived(**options)]


def test_the_fetcher_hands_over_scalars_and_text_in_order():
    fetcher = Fetcher()
    loss, one = torch.tensor(0.5), torch.ones(1, 1)
    left_out = fetcher.put(1, {"loss": loss, "one": one, "rows": torch.ones(2), "name": "x"})
    assert left_out == {"rows": "it is a tensor of shape (2,) in torch.float32"}
    assert fetcher.put(2, {"rows": torch.ones(2, dtype=torch.cfloat), "none": {}}).keys() == {"rows"}
    fetcher.put(3, {"count": 7, "lr": 0.25, "yes": True})
    assert arrived(fetcher) == [
        (1, {"loss": 0.5, "one": 1.0, "name": "x"}),
        (3, {"count": 7, "lr": 0.25, "yes": 1}),
    ]
    assert arrived(fetcher, wait=True) == []


def test_the_fetcher_gives_nested_values_names():
    fetcher = Fetcher()
    nested = {"eval": {"loss": torch.tensor(0.5), "top": {1: np.float32(0.25), 5: np.ones((1, 1))}}}
    assert fetcher.put(1, {**nested, "eval/loss": 2.0}) == {"eval/loss": "another metric has this name"}
    assert arrived(fetcher) == [(1, {"eval/loss": 0.5, "eval/top/1": 0.25, "eval/top/5": 1.0})]


def test_the_fetcher_keeps_what_is_not_finite_and_holds_no_graph():
    fetcher = Fetcher()
    value = torch.tensor(math.inf, requires_grad=True)
    fetcher.put(1, {"loss": value * 2})
    assert arrived(fetcher) == [(1, {"loss": math.inf})]


def test_a_log_starts_feeds_and_ends_its_trackers():
    first, second, shown = Kept(), Kept(), []
    log = Log([first, second], {"lr": 0.5}, shown.append)
    log.put(1, {"loss": torch.tensor(2.0)})
    log.put(2, {"loss": torch.tensor(1.0)})
    log.close()
    log.close()
    expected = [("start", {"lr": 0.5}), (1, {"loss": 2.0}), (2, {"loss": 1.0}), "finish"]
    assert first.said == second.said == expected
    assert shown == [{"loss": 2.0}, {"loss": 1.0}]


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(F.mse_loss(model(x), y, reduction="sum"), weight=y.numel())


def train(path, steps, **options):
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.ones(5, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    with fa.start(device="cpu"):
        model = fa.distribute(lambda: nn.Linear(2, 1), fa.local())
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(lr=0.01))
        seen = []
        state = train_step.init(seed=0)
        for state, metrics in fa.scan(
            train_step, state, fa.shard(loader), steps=steps, track=fa.Tracking(JsonlTracker(path), **options)
        ):
            seen.append((state.step, metrics["loss"].item()))
        train_step.close()
    return seen


def test_scan_writes_one_record_a_step(tmp_path):
    seen = train(tmp_path / "run", 4, config={"lr": 0.01})
    first, *rest = read_jsonl(tmp_path / "run")
    assert first["config"]["lr"] == 0.01
    assert "local" in first["config"]["plan"]
    assert [(r["step"], r["loss"]) for r in rest] == seen
    assert [step for step, _ in seen] == [1, 2, 3, 4]


def test_scan_writes_each_second_step_where_told(tmp_path):
    train(tmp_path / "run", 5, every=2)
    assert [r["step"] for r in read_jsonl(tmp_path / "run")[1:]] == [2, 4]


def test_the_fetcher_keeps_large_counts_and_floats_exactly():
    fetcher = Fetcher()
    exact = {"tokens": 123456789, "lr": 0.1, "seen": torch.tensor(123456789), "far": 1e40}
    fetcher.put(1, {**exact, "wide": torch.tensor(0.1, dtype=torch.float64), "huge": 10**400})
    [(_, values)] = arrived(fetcher)
    assert values == {
        "tokens": 123456789.0, "lr": 0.1, "seen": 123456789.0, "far": 1e40, "wide": 0.1, "huge": float("inf")
    }  # fmt: skip
