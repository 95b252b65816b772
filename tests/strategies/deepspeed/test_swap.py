"""The swap by one flag: the main example on DeepSpeed draws the loss curve of ddp."""

from __future__ import annotations

import json

import pytest

from tests.examples.test_examples import run


@pytest.mark.long
@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_train_gpt(tmp_path, precision, most):
    def curve(strategy):
        path = tmp_path / "losses.json"
        flags = ("--strategy", strategy, "--accumulate", "2", "--precision", precision)
        run("train_gpt", "--steps", "6", "--quiet", "--json", str(path), ranks=2, launch=flags)
        return json.loads(path.read_text())["losses"]

    expected = curve("ddp")
    assert expected[-1] < expected[0] - 0.5
    for strategy in ("deepspeed_zero2", "deepspeed_zero3"):
        assert curve(strategy) == pytest.approx(expected, abs=most), strategy
