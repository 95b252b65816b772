"""The examples with models of transformers: as a user starts them, and beside the same loop in PyTorch alone."""

from __future__ import annotations

import importlib

import pytest
import torch

import fnaccel as fa
from tests.examples.running import ROOT, result

pytestmark = pytest.mark.launcher
LAYOUTS = [(None, "local"), (2, "fsdp")]


@pytest.fixture
def example(monkeypatch):
    """Import an example as a module, as if it stood beside the test."""

    def load(name):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)

    return load


def raw_losses(build_model, loader, rate, updates):
    """The losses of a loop in PyTorch alone, with the mean loss that the model computes."""
    torch.manual_seed(0)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with fa.start(device="cpu"):  # for the order of the samples
        batches = list(fa.shard(loader))[:updates]
    losses = []
    for batch in batches:
        loss = model(**batch.data).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(example, loader, rate, updates):
    with fa.start(device="cpu"):
        train_step = fa.train_step(
            example.loss_fn, model=fa.distribute(example.build_model, "local"), optimizer=fa.adamw(rate)
        )
        scan = fa.scan(train_step, train_step.init(seed=0), fa.shard(loader), steps=updates)
        return [float(metrics["loss"]) for _, metrics in scan]


def test_nlp_classification_learns_and_its_curve_is_one(tmp_path):
    flags = ("--rows", "640", "--epochs", "2")
    runs = [
        result(tmp_path / "run.json", "nlp_classification", *flags, ranks=ranks, strategy=strategy)
        for ranks, strategy in LAYOUTS
    ]
    for found in runs:
        assert len(found["losses"]) == 32
        assert found["losses"][-1] < 0.6 * found["losses"][0]
        assert found["accuracy"] > 0.85
        assert found["losses"] == pytest.approx(runs[0]["losses"], abs=1e-4)


def test_nlp_classification_is_the_loop_in_pytorch(example):
    nlp = example("nlp_classification")
    loader, _ = nlp.data(rows=320, batch=32)
    found = losses_of(nlp, loader, 1e-3, 8)
    assert found == pytest.approx(raw_losses(nlp.build_model, loader, 1e-3, 8), abs=1e-5)
