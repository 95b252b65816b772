"""The premade recipes of DeepSpeed that a CPU can run, applied on two ranks."""

from __future__ import annotations

import pytest

from tests.config.premade import some_updates
from tests.config.test_premade_recipes import DEEPSPEED


@pytest.mark.long
@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_recipe_trains(pools, name):
    (losses, plan, _), second = pools.run(2, some_updates, name, {}, "")
    (replicated, _, _), _ = pools.run(2, some_updates, "ddp", {}, "")
    assert second[0] == losses == pytest.approx(replicated, abs=0.01)
    assert "[by deepspeed]" in plan
