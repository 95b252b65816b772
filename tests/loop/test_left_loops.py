"""A loop over `fa.scan(save=...)` that is left before its end."""

from __future__ import annotations

import contextlib
import itertools
import signal
import warnings
from unittest import mock

import pytest
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.program.train_step import TrainStep
from fnaccel.testing import RankPool
from fnaccel.world.world import current
from tests.tiny_models import batch_of, program

LAST = 3


def shards():
    return fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))


def by_break(states):
    for state, _ in states:
        if state.step == LAST:
            break


def by_return(states):
    for state, _ in states:
        if state.step == LAST:
            return state
    return None


def by_return_through_finally(states):
    for state, _ in states:
        try:
            if state.step == LAST:
                return
        finally:
            state.extras["seen"] = state.step


def by_break_of_a_counter(states):
    for _, (state, _) in zip(itertools.count(), states, strict=False):
        if state.step == LAST:
            break


def by_break_of_a_bar(states):
    for state, _ in passed_on(states):
        if state.step == LAST:
            break


def passed_on(items):
    """As a progress bar does."""
    with contextlib.ExitStack():
        for item in items:  # noqa: UP028
            yield item


def by_islice(states):
    for _ in itertools.islice(states, LAST):
        pass


def by_close(states):
    steps = iter(states)
    for state, _ in steps:
        if state.step == LAST:
            break
    steps.close()


def by_closing(states):
    with contextlib.closing(states):
        for _ in range(LAST):
            next(states)


ON_PURPOSE = [
    by_break, by_return, by_return_through_finally, by_break_of_a_counter, by_break_of_a_bar, by_islice, by_close,
    by_closing,
]  # fmt: skip
OPTIONS = {
    "plain": {},
    "background": {"background": True},
    "trackers": {"track": "jsonl"},
    "time": {"max_seconds": 1000},
    "every": {"every": 2},
}


def left(leave, folder, *, every=None, background=False, **options):
    """The steps that are saved after a loop was left, and the warnings."""
    train_step = program(strategy="ddp")
    own = fa.collectives.broadcast_objects(str(folder))
    save = fa.Autosave(own, every=every, background=background)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            # no variable holds the iterator
            leave(fa.scan(train_step, train_step.init(extras={}), shards(), steps=9, save=save, **options))
        except (KeyboardInterrupt, ValueError) as error:
            del error
    steps = [each.step for each in fa.checkpoint.checkpoints(own)]
    return steps, [str(each.message) for each in said if "is not saved" in str(each.message)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("leave", ON_PURPOSE)
def test_the_last_step_is_saved(tmp_path, world, leave, options):
    if leave in (by_break, by_return) or options == "plain":
        expected = [2, LAST] if options == "every" else [LAST]
        assert left(leave, tmp_path, **OPTIONS[options]) == (expected, [])


@pytest.fixture
def world():
    with fa.start(device="cpu") as started:
        yield started


def by_error(states):
    for state, _ in states:
        if state.step == LAST:
            raise ValueError


def by_error_of_a_call(states):
    for state, _ in states:
        if state.step == LAST:
            raising()


def raising():
    raise KeyboardInterrupt


def by_error_under_a_bar(states):
    for state, _ in passed_on(states):
        if state.step == LAST:
            raise ValueError


def by_error_under_closing(states):
    with contextlib.closing(states):
        for state, _ in states:
            if state.step == LAST:
                raise ValueError


def by_next(states):
    steps = iter(states)
    for _ in range(LAST):
        next(steps)


@pytest.mark.parametrize(
    "leave", [by_error, by_error_of_a_call, by_error_under_a_bar, by_error_under_closing, by_next]
)
def test_an_error_saves_nothing_and_says_what_is_lost(tmp_path, world, leave):
    steps, said = left(leave, tmp_path, every=2)
    assert steps == [2]
    (text,) = said
    assert f"step {LAST} is not saved in {tmp_path}, where the newest is 2: an exception" in text


def to_the_end(states):
    for _ in states:
        pass


def test_nothing_is_said_at_the_end(tmp_path, world):
    assert left(to_the_end, tmp_path) == ([9], [])


def test_a_loop_that_a_variable_holds_goes_on(tmp_path, world):
    train_step = program()
    states = fa.scan(train_step, train_step.init(), shards(), steps=9, save=tmp_path)
    for last in LAST, 2 * LAST:
        by_break_at(states, last)
        assert fa.checkpoint.checkpoints(tmp_path)[-1].step == last
    assert [state.step for state, _ in states] == [7, 8, 9]


def by_break_at(states, last):
    for state, _ in states:
        if state.step == last:
            break


def by_a_step_of_its_own(states, train_step):
    for state, _ in states:
        if state.step == LAST:
            train_step(state, batch_of(4))
            break


def test_the_state_that_is_live_is_saved(tmp_path, world):
    train_step = program()
    states = fa.scan(train_step, train_step.init(), shards(), steps=9, save=tmp_path)
    by_a_step_of_its_own(states, train_step)
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [LAST + 1]
    states.close()


def test_a_step_that_the_script_saved_is_not_lost(tmp_path, world):
    train_step = program()
    states = fa.scan(train_step, train_step.init(), shards(), steps=9, save=tmp_path)
    for _ in range(LAST):
        state, _ = next(states)
    fa.save(tmp_path, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states.leave(False)
    states.close()


def ranks_leave(folder, option):
    return left(by_break, folder, **OPTIONS[option])


@pytest.mark.parametrize("option", ["plain", "background"])
def test_all_ranks_save(pools, tmp_path, option):
    assert pools.run(2, ranks_leave, tmp_path, option) == [([LAST], [])] * 2


def alone(folder, strategy):
    """Rank 0 leaves its loop, and the others train on. What a rank raises, the steps saved, and the warnings."""
    train_step = program(strategy=strategy)
    error = ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=9, save=folder):
                if state.step == LAST and current().rank == 0:
                    break
        except fa.errors.FnaccelError as raised:
            error = type(raised).__name__
    steps = [each.step for each in fa.checkpoint.checkpoints(folder)]
    return error, steps, [str(each.message) for each in said if "is not saved" in str(each.message)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_leaves_alone_saves_nothing(tmp_path, strategy):
    # patched before ranks fork
    with mock.patch("fnaccel.loop.autosave.TOGETHER", 0.5), RankPool(2) as pool:
        first, second = pool.run(alone, tmp_path, strategy)
    error, steps, (text,) = first
    assert (error, steps) == ("", [])
    assert "not all ranks left the loop after this step" in text
    assert second == ("PeerLostError", [], [])


@pytest.mark.parametrize("saves", [True, False])
def test_a_ctrl_c_says_after_which_step_and_what_was_saved(tmp_path, world, monkeypatch, saves):
    train_step, calls = program(), itertools.count(1)
    plain = TrainStep.__call__

    def interrupted(self, state, batch, **given):
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return plain(self, state, batch, **given)

    monkeypatch.setattr(TrainStep, "__call__", interrupted)
    save = fa.Autosave(tmp_path / "run", every=2) if saves else None
    loop = fa.scan(train_step, train_step.init(), shards(), steps=9, save=save)
    with pytest.raises(KeyboardInterrupt) as raised:
        list(loop)
    loop.close()
    last = tmp_path / "run" / "step-0000000002" if saves else "nothing"
    assert raised.value.__notes__ == [f"fa.scan was interrupted after step 3, and saved last: {last}"]
