"""The watchdog says nothing of what is only slow on one rank: fifty runs of its cases."""

from __future__ import annotations

import pytest

from tests.launch import test_watchdog as cases

pytestmark = pytest.mark.launcher
RUNS = 50


@pytest.mark.parametrize("number", range(RUNS))
def test_what_is_slow_is_no_alarm(launcher, number):
    what = ("first step, evaluation, compilation, save", "compile", "item", "workers")[number % 4]
    if number % 4 == 0:
        cases.test_slow_ranks_are_no_alarm(launcher)
    else:
        cases.test_no_alarm_for_what_is_slow_on_one_rank(
            launcher, what, {"compile": 6.0, "item": 0.9, "workers": 3.5}[what]
        )
