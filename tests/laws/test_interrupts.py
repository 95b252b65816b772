"""Law 15: an interrupt at any line of a step leaves a state that is live and exact, or dead with a way back.

A sample of the lines; `make soak` takes every one of them, and captured steps too, which compile for each line.
"""

from __future__ import annotations

import contextlib

import pytest

from fnaccel.world.undo import Swapped
from tests.laws.interrupted_calls import CALLS, SWAPS, interrupt_call
from tests.laws.interrupts import Interrupter, interrupt_many

STRIDE = 13


@pytest.mark.long_except(r"(local|ddp)-1-")
@pytest.mark.parametrize(
    ("kind", "ranks", "stride"),
    [("local", 1, 5), ("ddp", 1, STRIDE), ("fsdp", 1, STRIDE), ("ddp", 2, 41)],
)
def test_law_15_an_interrupt_leaves_an_exact_state_or_a_way_back(pools, kind, ranks, stride):
    pool = pools.pool(ranks)
    usual, pool.timeout = pool.timeout, 240.0  # a captured step compiles for each line, under a tracer
    try:
        every_rank = pool.run(interrupt_many, kind, 1, stride)
    finally:
        pool.timeout = usual
    for outcomes in every_rank:
        assert len(outcomes) > 5
        assert not [outcome for outcome in outcomes if outcome.wrong]
        kinds = {outcome.kind for outcome in outcomes}
        assert "live" in kinds
        assert kinds <= {"live", "following", "dead"}


def test_law_15_holds_for_a_second_gradient(pools):
    (outcomes,) = pools.run(1, interrupt_many, "second gradient", 11, 53, 1)
    assert len(outcomes) > 5
    assert not [outcome for outcome in outcomes if outcome.wrong]


@pytest.mark.long_except(r"local")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["local", "fsdp"])
def test_law_15_holds_for_the_calls_around_a_step(pools, call, kind):
    (outcomes,) = pools.run(1, interrupt_call, call, kind, 7, 223)
    assert len(outcomes) > 5
    assert not [outcome for outcome in outcomes if outcome.wrong]


@pytest.mark.long_except(r"local|fsdp-evaluate.*-1$")
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize(("call", "stride"), list(zip(SWAPS, [89, 23, 3, 7, 89], strict=True)))
@pytest.mark.parametrize("kind", ["local", "fsdp"])
def test_law_15_holds_for_calls_that_change_the_model_for_a_while(pools, call, stride, kind, signals):
    (outcomes,) = pools.run(1, interrupt_call, call, kind, 2, stride, signals)
    assert len(outcomes) > 5
    assert not [outcome for outcome in outcomes if outcome.wrong]
    assert call.startswith("init") or "dead" not in {outcome.kind for outcome in outcomes}


@pytest.mark.long
@pytest.mark.parametrize(("call", "stride"), [("evaluate(ema=True)", 13), ("export_hf(ema=True)", 53)])
def test_an_error_that_nothing_holds_back_leaves_no_mixed_values(pools, call, stride):
    """The handler of a SIGALRM raises at any line, also while parameters and averages are exchanged."""
    (outcomes,) = pools.run(1, interrupt_call, call, "local", 2, stride, -1)
    assert len(outcomes) > 5
    assert not [outcome for outcome in outcomes if outcome.wrong]
    assert "live" in {outcome.kind for outcome in outcomes}


@pytest.mark.long_except("^1")
@pytest.mark.parametrize("signals", [1, 2, -1])
def test_law_15_holds_for_a_look_where_an_optimizer_evaluates(pools, signals):
    """One line is left out: a tracer sees `with point:` again before its exit, where Python takes no signal."""
    (outcomes,) = pools.run(1, interrupt_call, "look", "schedule-free", 1, 4, signals)
    assert len(outcomes) > 40
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    assert len(wrong) <= 1
    assert all(outcome.place.startswith("model_access.py") and outcome.kind == "dead" for outcome in wrong)


@pytest.mark.parametrize("kind", ["local", "fsdp"])
def test_law_15_holds_where_init_takes_the_modules(pools, kind):
    (outcomes,) = pools.run(1, interrupt_call, "init of a built module", kind, -30, 1, 2)
    assert len(outcomes) == 31
    assert not [outcome for outcome in outcomes if outcome.wrong]


@pytest.mark.long_except(r"-1$")
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize(("call", "last"), [("evaluate(ema=True)", 90), ("init of a built module", 40)])
def test_no_handler_of_sigint_stays(pools, call, last, signals):
    (outcomes,) = pools.run(1, interrupt_call, call, "local", -last, 1, signals)
    assert not [outcome for outcome in outcomes if outcome.wrong]


class Other(Swapped):
    value = "own"

    def change(self):
        self.value = "other"

    def undo(self):
        self.value = "own"


def left_by_sigints():
    """What a swap leaves for a SIGINT at each line of its two ends."""
    left = []
    with Interrupter(None) as whole, Other():
        pass
    for at in range(1, whole.lines + 1):
        other = Other()
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at, 1), other:
            pass
        left.append(other.value)
    return left


def test_a_swap_is_undone_at_whatever_line_of_its_ends_a_sigint_arrives(pools):
    (left,) = pools.run(1, left_by_sigints)
    assert left == ["own"] * len(left)
    assert len(left) > 10
