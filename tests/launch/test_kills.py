"""The short form of `make soak`: a run that is killed ends with the bits of one that was not."""

from __future__ import annotations

import pytest

from tests.soak.killing import Kill, Training

pytestmark = pytest.mark.launcher
STEPS = 14


@pytest.mark.long
def test_a_run_that_was_killed_in_a_save_and_between_two(launcher):
    expected = Training(launcher, "undisturbed", STEPS).finish()
    run = Training(launcher, "killed", STEPS, ("--save-every", "2", "--keep", "2"))
    run.kill(Kill("one rank", "save", 1, 0.5))
    run.kill(Kill("launcher", "step", 1, 0.5))
    found = run.finish()
    assert found["first"] > 2
    assert found["losses"] == expected["losses"][found["first"] - 1 :]
    assert found["digest"] == expected["digest"]
    assert sorted(run.committed()) == [f"step-{step:010d}" for step in (12, 14)]
    again = run.start(1).wait()
    assert (again.code, again.err) == (0, "")
    assert "finished already, at step 14" in again.out
    assert run.result() == {"first": 15, "losses": [], "digest": expected["digest"]}
