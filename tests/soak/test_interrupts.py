"""Law 15 at every line of a step: what an interrupt leaves, counted."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.laws.interrupts import KINDS, interrupt_many


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_step(pools, kind):
    pools.pool(1).timeout = 1800.0
    (outcomes,) = pools.run(1, interrupt_many, kind, 1, 1)
    counts = Counter(outcome.kind for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    print(f"\n{kind}: {len(outcomes)} lines, {dict(counts)}, {len(wrong)} wrong")
    assert not wrong
