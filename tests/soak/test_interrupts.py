"""Law 15 at every line of a step, and of the calls around it: what an interrupt leaves, counted."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.laws.interrupted_calls import CALLS, SWAPS, interrupt_call
from tests.laws.interrupts import KINDS, interrupt_many

pytestmark = pytest.mark.timeout(7200)
LIMIT = 7200.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_step(pools, kind):
    pools.pool(1).timeout = LIMIT
    (outcomes,) = pools.run(1, interrupt_many, kind, 1, 1)
    count(f"step, {kind}", outcomes)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["local", "fsdp"])
def test_every_line_of_a_call(pools, call, kind):
    pools.pool(1).timeout = LIMIT
    (outcomes,) = pools.run(1, interrupt_call, call, kind, 1, 1)
    count(f"{call}, {kind}", outcomes)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("call", SWAPS)
@pytest.mark.parametrize("kind", ["local", "fsdp"])
def test_every_line_of_a_call_that_changes_the_model_for_a_while(pools, call, kind, signals):
    pools.pool(1).timeout = LIMIT
    (outcomes,) = pools.run(1, interrupt_call, call, kind, 1, 1, signals)
    count(f"{call}, {kind}, {signals} SIGINTs", outcomes)


def count(of, outcomes):
    """Print how the interrupts ended, and see that none left something wrong."""
    counts = Counter(outcome.kind for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    print(f"\n{of}: {len(outcomes)} lines, {dict(counts)}, {len(wrong)} wrong", flush=True)
    assert not wrong
