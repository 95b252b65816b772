"""The oracle against arithmetic done by hand, and the comparison of trees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fnaccel.errors import TreeMismatchError, UnknownNameError
from fnaccel.step.loss import Mean
from fnaccel.testing import TOLERANCES, assert_close, differences, oracle_run, tolerance


def make_line():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    return model


def squares(model, batch):
    gap = model(batch["x"]) - batch["y"]
    return Mean(gap.square().sum(), weight=gap.numel())


def rows(*values):
    x = torch.tensor(values).reshape(-1, 1)
    return {"x": x, "y": torch.zeros_like(x)}


def test_sgd_by_hand_on_ragged_micro_batches():
    # loss = w^2 mean(x^2), gradient = 2 w mean(x^2): mean of 1, 4, 9 over all rows, not over micro-batches
    found = oracle_run(make_line, squares, [[rows(1.0, 2.0), rows(3.0)]] * 2, lr=0.01)
    mean, w = 14 / 3, 2.0
    for loss, norm in zip(found.losses, found.grad_norms, strict=True):
        assert loss == pytest.approx(w * w * mean)
        assert norm == pytest.approx(2 * w * mean)
        w -= 0.01 * 2 * w * mean
    assert found.params["weight"].item() == pytest.approx(w)


def test_clipping_by_hand():
    found = oracle_run(make_line, squares, [[rows(1.0)]], lr=0.5, clip=1.0)
    assert found.grad_norms == pytest.approx([4.0])
    assert found.params["weight"].item() == pytest.approx(2.0 - 0.5)


def test_adamw_by_hand():
    found = oracle_run(make_line, squares, [[rows(1.0)]], lr=0.1, optimizer="adamw", weight_decay=0.0)
    assert found.params["weight"].item() == pytest.approx(2.0 - 0.1, abs=1e-6)


def test_bf16_rounds_and_fp32_does_not():
    batches = [[rows(1.001, 0.3)]]
    exact = oracle_run(make_line, squares, batches, lr=0.1).losses[0]
    rounded = oracle_run(make_line, squares, batches, lr=0.1, precision="bf16").losses[0]
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=tolerance("bf16").relative)


def test_the_seed_decides_and_a_module_is_taken_as_it_is():
    first, second, other = (
        oracle_run(lambda: nn.Linear(1, 1), squares, [], lr=0.1, seed=seed).params for seed in (3, 3, 4)
    )
    assert_close(first, second)
    assert differences(first, other)
    module = make_line()
    oracle_run(module, lambda model, batch: model(batch["x"]).mean(), [[rows(1.0)]], lr=1.0)
    assert module.weight.item() == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"optimizer": "sdg"}, {"precision": "bf61"}])
def test_unknown_names(options):
    with pytest.raises(UnknownNameError, match="did you mean"):
        oracle_run(make_line, squares, [], lr=0.1, **options)


def test_every_difference_is_listed():
    left = {
        "a": torch.zeros(2),
        "b": torch.tensor(1),
        "c": 1.0,
        "only": 1,
        "same": "x",
        "shape": torch.ones(1),
    }
    right = {"a": torch.ones(2), "b": torch.tensor(2), "c": 1.1, "same": "x", "shape": torch.ones(2)}
    lines = differences(left, right)
    assert [line.split(":")[0] for line in lines] == ["only", "a", "b", "c", "shape"]
    assert "off by 1, allowed 1e-06" in lines[1]
    with pytest.raises(TreeMismatchError, match="5 leaves differ"):
        assert_close(left, right)
    assert differences(torch.ones(1), torch.ones(1).double()) == [
        "(root): dtype torch.float32 is not torch.float64"
    ]


def test_the_table():
    assert tolerance("fp32").absolute == 1e-6
    assert tolerance(torch.int64).absolute == 0.0
    assert all(one.reason for one in TOLERANCES.values())
    assert not differences(torch.tensor(1.0), torch.tensor(1.01), precision="bf16")
    assert not differences(torch.tensor(math.nan), torch.tensor(math.nan))
    with pytest.raises(UnknownNameError, match="fp32"):
        tolerance("fp23")
