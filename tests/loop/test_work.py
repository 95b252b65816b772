"""`fa.scan(given=, before=, after=, updates_per_batch=)`: what a loop does with each batch."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, LaunchError, Preempted, UnleasedStateError
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

ROWS = 24


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def shards(**options):
    return fa.shard(DataLoader(TensorDataset(*batch_of(ROWS)), batch_size=4, shuffle=True), seed=1, **options)


def distilled(model, batch, given):
    """A loss with a teacher, a temperature by the update, and a constant."""
    x, _ = batch
    wanted = given["teacher"](x) / given["temperature"]
    loss = F.mse_loss(model(x) / given["temperature"], wanted, reduction="sum")
    return fa.Mean(given["share"] * loss, weight=len(x))


def temperature(update):
    return 2.0 - 0.1 * update


@pytest.mark.parametrize("scope", [None, "loss", "step"])
def test_a_loss_reads_models_numbers_and_schedules(scope):
    step = distilled if scope is None else fa.compile(distilled, scope=scope, backend="aot_eager")
    teacher_step, train_step = program(model=Net, optimizer=fa.sgd(0.1)), program(step, optimizer=fa.sgd(0.1))
    teacher = teacher_step.init(seed=7)
    given = {"teacher": teacher, "temperature": temperature, "share": 0.5}
    state, model, wise = train_step.init(seed=0), Net(), Net()
    model.load_state_dict(state.params)
    wise.load_state_dict(teacher.params)
    batches = [batch.data for batch in shards()]
    for state, metrics in fa.scan(train_step, state, shards(), given=given):
        heat = torch.tensor(temperature(state.step - 1))
        values = {"teacher": wise.requires_grad_(False), "temperature": heat, "share": torch.tensor(0.5)}
        x, y = batches[state.step - 1]
        loss = distilled(model, (x, y), values)
        (loss.total / len(x)).backward()
        torch.testing.assert_close(metrics["loss"], loss.total.detach() / len(x), rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    assert fa.tree.allclose(whole_params(state), dict(model.named_parameters()), rtol=1e-5, atol=1e-7)


def rollout(train_step, state, batch):
    """New targets from the parameters as they are, as a rollout's are."""
    x, _ = batch.data
    found = train_step.look(state, lambda model: model(x))
    return batch.replace((x, found + 0.5 * x.sum(1, keepdim=True)))


def noted(state, metrics, batch):
    seen = (state.extras or {"mean": torch.zeros(())})["mean"]
    return state.with_extras({"mean": 0.9 * seen + 0.1 * metrics["loss"].detach().cpu()})


def run(folder, kill=None, ask=None, steps=30, every=4):
    train_step = program(loss_fn, strategy="ddp", optimizer=fa.adamw(0.02))
    state = fa.resume_or_init(folder, train_step)
    first, stopped, evaluated = state.step, None, []
    loop = fa.scan(
        train_step,
        state,
        shards(),
        steps=steps,
        before=lambda state, batch: rollout(train_step, state, batch),
        after=noted,
        updates_per_batch=3,
        evaluate=fa.Evaluation(loss_fn, shards(), every=4),
        save=fa.Autosave(folder, every=every),
    )
    try:
        for state, metrics in loop:
            evaluated += [state.step] if "eval/loss" in metrics else []
            if state.step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == ask:
                os.kill(os.getpid(), signal.SIGTERM)
    except Preempted as ended:
        stopped = ended.step
    found = whole_params(state), float(state.extras["mean"]), state.data
    train_step.close()
    return first, found, stopped, evaluated, [each.step for each in fa.checkpoint.checkpoints(folder)]


def same(one, other):
    return fa.tree.allclose(one[0], other[0], rtol=0, atol=0) and one[1:] == other[1:]


def test_several_updates_on_one_rollout_are_those_of_a_loop_by_hand(tmp_path):
    train_step = program(loss_fn, strategy="ddp", optimizer=fa.adamw(0.02))
    state = train_step.init()
    for _ in range(2):
        for batch in shards().at(state.data):
            made = rollout(train_step, state, batch)
            for _ in range(3):
                state, metrics = train_step(state, made)
                state = noted(state, metrics, made)
            if state.step == 30:
                break
    found = run(tmp_path)
    assert same(found[1], (whole_params(state), float(state.extras["mean"]), found[1][2]))
    assert found[3] == [6, 9, 12, 18, 21, 24, 30]  # each fourth, once its batch is done
    assert found[4] == [6, 9, 12, 18, 21, 24, 30]


@pytest.mark.parametrize("kill", [8, 13])
def test_a_run_that_is_killed_between_two_updates_goes_on_with_the_same_bits(pools, tmp_path, kill):
    expected = pools.run(2, run, tmp_path / "a")[0]
    with pytest.raises(LaunchError):
        pools.run(2, run, tmp_path / "b", kill)
    first, found, *_ = pools.run(2, run, tmp_path / "b")[0]
    assert first == (6 if kill == 8 else 12)
    assert same(found, expected[1])


def test_a_stop_request_waits_for_the_last_update_of_the_batch(pools, tmp_path):
    *_, stopped, _, saved = pools.run(2, run, tmp_path, None, 4, every=100)[0]
    assert stopped == saved[-1] == 6


def test_steps_round_up_and_windows_are_prepared_batch_by_batch(tmp_path):
    assert run(tmp_path, steps=10)[4][-1] == 12
    train_step, seen = program(), []

    def before(state, batch):
        seen.append(len(batch.data[0]))
        return batch.data[0] + 1, batch.data[1]  # the data alone

    states = [
        state.step for state, _ in fa.scan(train_step, train_step.init(), shards(window=2), before=before)
    ]
    assert states == [1, 2, 3]
    assert seen == [4] * 6


def test_a_loop_that_is_left_between_two_updates_keeps_its_last_whole_batch(tmp_path):
    train_step = program()

    def left():
        save = fa.Autosave(tmp_path, every=4)
        for state, _ in fa.scan(train_step, train_step.init(), shards(), updates_per_batch=2, save=save):
            if state.step == 7:
                break

    with pytest.warns(UserWarning, match="left between two updates on one batch"):
        left()
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [4]


def test_windows_of_sizes_by_the_step_get_one_update():
    train_step = program()
    with pytest.raises(ArgumentError, match="the size of a window depends on the step"):
        fa.scan(train_step, train_step.init(), shards(window=lambda step: 1), updates_per_batch=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"given": {"name": "text"}}, ArgumentError, "given\\['name'\\] is str, not the state of"),
        ({"updates_per_batch": 0}, ArgumentError, "updates_per_batch=0"),
        ({"before": lambda state, batch: None}, ArgumentError, "before returned None"),
        ({"after": lambda state, metrics, batch: None}, ArgumentError, "this is NoneType, not the state"),
        (
            {"after": lambda state, metrics, batch: fa.snapshot(state)},
            UnleasedStateError,
            "after\\(state, metrics, batch\\)",
        ),
    ],
)
def test_mistakes(options, error, message):
    train_step = program(distilled if "given" in options else loss_fn)
    with pytest.raises(error, match=message):
        list(fa.scan(train_step, train_step.init(), shards(), **options))
