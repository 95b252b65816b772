"""Each kind of ordinary PyTorch that once trained wrongly: the raw loop's numbers, or an error by name."""

from __future__ import annotations

import pytest
import torch

from fnaccel import errors
from fnaccel.interchange.parameter_names import unwrapped
from fnaccel.testing import assert_close, oracle_run
from tests.parity.traps import RATES, STEPS, TRAPS, run_trap

STRATEGIES = {"local": 1, "ddp": 2, "fsdp": 2}


# the options of a trap are those of sgd
ROWS = [
    (name, rule, strategy)
    for name, trap in TRAPS.items()
    for rule in RATES
    for strategy in trap.strategies
    if rule == "sgd" or not trap.options
]


@pytest.mark.long_except("sgd-.*eager|local-eager|scalars-sgd")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(("name", "optimizer", "strategy"), ROWS)
def test_equals_the_raw_loop(pools, name, optimizer, strategy, mode):
    trap, ranks, compiled = TRAPS[name], STRATEGIES[strategy], mode == "compiled"
    refused = trap.refused.get((strategy, mode))
    if refused is not None:
        with pytest.raises(errors.FnaccelError, match=refused):
            pools.run(ranks, run_trap, name, strategy, optimizer, compiled)
        return
    model = _seeded(trap.make)
    batches = [[trap.batch(step, rank) for rank in range(ranks)] for step in range(STEPS)]
    low = trap.precision or "fp32"
    rule = {"lr": RATES[optimizer], "optimizer": optimizer, "precision": low}
    oracle = oracle_run(model, trap.loss, batches, **rule, **trap.options)
    for result in pools.run(ranks, run_trap, name, strategy, optimizer, compiled):
        assert_close(result["losses"], oracle.losses, precision=low)
        assert_close(result["params"], {unwrapped(n): x for n, x in oracle.params.items()}, precision=low)
        assert_close(result["buffers"], dict(model.named_buffers()))


def _seeded(make):
    torch.manual_seed(0)
    return make()
