"""`make soak`: a run that is killed again and again, a hundred times in all, anywhere, ends with the bits of one that was not."""

from __future__ import annotations

import pytest

from tests.soak.killing import Kill, Training, children, kills, signal_process

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(3600)]
STEPS = 600


def undisturbed(launcher, strategy="ddp"):
    return Training(launcher, "undisturbed", STEPS, ("--save-every", "50"), strategy).finish()


@pytest.mark.parametrize(
    ("every", "count", "strategy", "saving"),
    [(1, 49, "ddp", ()), (3, 19, "fsdp", ()), (2, 19, "fsdp", ("--background",))],
)
def test_many_kills(launcher, every, count, strategy, saving):
    expected = undisturbed(launcher, strategy)
    flags = ("--save-every", str(every), "--keep", "3", *saving)
    run = Training(launcher, "killed", STEPS, flags, strategy)
    steps = []
    for kill in kills(seed=every, count=count):
        run.kill(kill)
        steps.append(newest(run))
        print(kill, "-> step", steps[-1], flush=True)
    assert steps == sorted(steps), "a kill took a checkpoint away"
    assert 0 < steps[-1] < STEPS
    found = run.finish()
    assert found["first"] == steps[-1] + 1
    assert found["losses"] == expected["losses"][steps[-1] :]
    assert found["digest"] == expected["digest"]
    assert len(run.committed()) == 3


def newest(run):
    """The step of the newest checkpoint."""
    return max((int(name[5:15]) for name in run.committed()), default=0)


def test_the_launcher_starts_again_by_itself(launcher):
    expected = undisturbed(launcher)
    run = Training(launcher, "restarted", STEPS, ("--save-every", "2"))
    started = run.start(2, "--max-restarts", 8)
    for at in range(8):
        run.wait_for(Kill("one rank", "step", 1 + at % 3, 0.1 * at), started.pid)
        signal_process(children(started.pid)[0])
    ended = started.wait()
    assert ended.code == 0, ended.err
    assert ended.err.count("attempt") == 8
    found = run.result()
    assert found["losses"] == expected["losses"][found["first"] - 1 :]
    assert found["digest"] == expected["digest"]


def test_from_two_ranks_to_one_to_four(launcher):
    expected = undisturbed(launcher)
    run = Training(launcher, "moved", STEPS, ("--save-every", "2"))
    for ranks, kill in zip((2, 1, 4, 1, 2), kills(seed=5, count=5), strict=True):
        run.kill(kill, ranks)
    found = run.finish(4)
    # other ranks round differently, and a run of hundreds of steps multiplies that
    losses = expected["losses"][found["first"] - 1 : 120]
    assert len(losses) > 20
    assert found["losses"][: len(losses)] == pytest.approx(losses, abs=1e-4)
