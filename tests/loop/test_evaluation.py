"""`fa.scan(evaluate=)`: when a loop evaluates, and which checkpoints and which end follow from it."""

from __future__ import annotations

import math
import os
import signal

import attrs
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, LaunchError
from tests.tiny_models import batch_of, loss_fn, program

NAN = math.nan
LOSSES = [9, 5, 7, 4, 6, NAN, 3, 8, 3, 2.9, 9, 9, 9, 9]
"""After the steps 0, 1, 2, ..."""


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


class Rows:
    """A tracker that keeps what is logged."""

    def __init__(self):
        self.rows = []

    def start(self, config):
        pass

    def log(self, step, metrics):
        self.rows.append((step, metrics))

    def finish(self):
        pass


def shards(rows=8):
    return fa.shard(DataLoader(TensorDataset(*batch_of(rows)), batch_size=4, shuffle=True), seed=1)


def scripted(model, batch, *, info):
    return {"loss": fa.Mean(torch.tensor(float(LOSSES[info.step])), weight=1)}


def run(record, folder=None, steps=13, kill=None, train_step=None, **options):
    """The steps that were evaluated with their values, the steps of all checkpoints, and the last step."""
    train_step = train_step or program(strategy="ddp")
    state = fa.resume_or_init(folder, train_step)
    save = folder and fa.Autosave(folder, **options)
    found = {}
    for state, metrics in fa.scan(train_step, state, shards(), steps=steps, evaluate=record, save=save):
        if "eval/loss" in metrics:
            found[state.step] = metrics["eval/loss"]
        if state.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    saved = [] if folder is None else [each.step for each in fa.checkpoint.checkpoints(folder)]
    train_step.close()
    return found, saved, state.step


def test_metrics_are_those_of_the_data_set_at_that_step():
    train_step = program()
    state = train_step.init()
    val = fa.Evaluation(loss_fn, shards(10), every=2)
    rows = Rows()
    for state, metrics in fa.scan(train_step, state, shards(), steps=4, evaluate=val, track=[rows]):
        expected = fa.evaluate(train_step, state, loss_fn, shards(10))
        assert metrics.get("eval/loss") == (float(expected) if state.step % 2 == 0 else None)
    assert ["eval/loss" in row for _, row in rows.rows] == [False, True, False, True]


def test_an_evaluation_is_logged_at_a_step_that_is_not():
    train_step = program()
    val = [
        fa.Evaluation(loss_fn, shards(), every=2, first=True),
        fa.Evaluation(loss_fn, shards(), name="test", every=3, limit=1),
    ]
    track = fa.Tracking(rows := Rows(), every=4)
    for _ in fa.scan(train_step, train_step.init(), shards(), steps=4, evaluate=val, track=track):
        pass
    names = {step: sorted(name for name in row if "loss" in name) for step, row in rows.rows}
    assert names == {0: ["eval/loss"], 2: ["eval/loss"], 3: ["test/loss"], 4: ["eval/loss", "loss"]}


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, [9, 12, 13]),
        ({"mode": "max"}, [10, 12, 13]),
        ({"keep_best": 3}, [6, 8, 9, 12, 13]),
        ({"every": 2}, [6, 12, 13]),
        ({"every": 5}, [10, 12, 13]),  # the first value is NaN
    ],
    ids=str,
)
def test_the_best_checkpoints_stay(tmp_path, options, saved):
    record = fa.Evaluation(scripted, shards(), best="loss", **{"every": 1} | options)
    found, kept, _ = run(record, tmp_path, every=4, keep=2)
    assert kept == saved
    values = {step: value for step, value in found.items() if not math.isnan(value)}
    best = max(values, key=values.get) if record.mode == "max" else min(values, key=values.get)
    assert fa.checkpoint.best(tmp_path).name == f"step-{best:010d}"
    assert fa.checkpoint.best(tmp_path, "eval/loss", mode="max").name != fa.checkpoint.best(
        tmp_path, "eval/loss", mode="min"
    )


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"patience": 2}, 5),  # 4 at step 3, then 6 and NaN
        ({"patience": 3}, 12),
        ({"patience": 3, "min_delta": 0.5}, 9),  # 2.9 is no improvement on 3
        ({"patience": 2, "every": 3}, 13),
        ({"patience": 4, "mode": "max"}, 6),
    ],
    ids=str,
)
def test_patience_ends_the_loop(tmp_path, options, last, caplog):
    record = fa.Evaluation(scripted, shards(), best="loss", **{"every": 1} | options)
    _, saved, step = run(record, tmp_path)
    assert step == last == saved[-1]
    assert ("training ends after step" in caplog.text) == (last < 13)
    assert run(record, tmp_path) == ({}, saved, last)  # begun again, it is at its end


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("stop", [3, 6, 8, 11])
def test_a_resumed_run_decides_as_one_that_was_not_stopped(tmp_path, every, stop):
    record = fa.Evaluation(scripted, shards(), every=1, best="loss", patience=3, keep_best=2)
    expected, kept, last = run(record, tmp_path / "a", every=every, keep=2)
    run(record, tmp_path / "b", steps=stop, every=every, keep=2)
    found, saved, step = run(record, tmp_path / "b", every=every, keep=2)
    assert step == last
    assert {path: str(value) for path, value in expected.items() if path > stop} == {
        path: str(value) for path, value in found.items()
    }
    best = fa.checkpoint.best
    assert best(tmp_path / "a").name == best(tmp_path / "b").name
    assert saved[-1] == kept[-1]


def ranks_run(folder, kill=None):
    return run(fa.Evaluation(scripted, shards(), every=1, best="loss", patience=3), folder, 13, kill, every=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_decides_the_same_on_another_number_of_ranks(pools, tmp_path, ranks):
    expected = pools.run(1, ranks_run, tmp_path / "a")[0]
    with pytest.raises(LaunchError):
        pools.run(3 - ranks, ranks_run, tmp_path / "b", 7)
    found, saved, last = pools.run(ranks, ranks_run, tmp_path / "b")[0]
    assert (saved, last) == expected[1:]
    assert min(found) == 7  # 3 at step 6 was the best so far, and is saved


def test_epochs(tmp_path):
    """Two batches make one. Evaluations, saves and logs all know of their ends."""
    train_step = program()
    val = fa.Evaluation(loss_fn, shards())
    track = fa.Tracking(rows := Rows(), every="epoch")
    save = fa.Autosave(tmp_path, every="epoch")
    ended = []
    for state, metrics in fa.scan(
        train_step, train_step.init(), shards(), steps=5, evaluate=val, track=track, save=save
    ):
        assert state.data.epoch_ended == ("eval/loss" in metrics)
        ended.append(state.data.epoch_ended)
    assert ended == [False, True, False, True, False]
    assert [step for step, _ in rows.rows] == [2, 4]
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [2, 4, 5]


def test_an_evaluation_leaves_the_run_as_it_is():
    """The same parameters as without one: modes, generators and the position in the data are as before."""
    ends = []
    for val in (None, fa.Evaluation(loss_fn, shards(10), every=1)):
        train_step = program(model=lambda: torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)))
        for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=5, evaluate=val):
            pass
        ends.append({name: value.detach().clone() for name, value in state.params.items()})
        train_step.close()
    assert fa.tree.allclose(*ends, rtol=0, atol=0)


def apart(folder):
    train_step = program(strategy="local_sgd(2, every=3)")
    return run(fa.Evaluation(loss_fn, shards(), every=2), folder, steps=9, train_step=train_step)


def test_replicas_are_evaluated_after_their_next_average(pools, tmp_path):
    found = pools.run(2, apart, tmp_path)
    assert [sorted(steps) for steps, *_ in found] == [[3, 6, 9]] * 2


def test_saves_by_hand(tmp_path):
    train_step = program()
    state = train_step.init()
    for step, accuracy in enumerate([0.5, 0.75, 0.25, math.inf, 0.625]):
        metrics = {"accuracy": torch.tensor(accuracy), "loss": 1.0}
        fa.save(
            tmp_path,
            state,
            step=step,
            metrics=metrics,
            best="accuracy",
            mode="max",
            keep_best=2,
            keep=1,
        )
    fa.save_async(tmp_path, state, step=5, keep=1).wait()  # a save without metrics leaves the best
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == [1, 4, 5]
    assert fa.checkpoint.best(tmp_path).name == "step-0000000001"
    assert fa.checkpoint.best(tmp_path, "loss", mode="min").name == "step-0000000001"
    assert fa.checkpoint.best(tmp_path / "none") is None
    assert fa.restore(fa.checkpoint.best(tmp_path), like=state).step == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda root, state: fa.save(root, state, metrics={"loss": 1}, best="acc"), "none of metrics="),
        (lambda root, state: fa.save(root, state, metrics={"loss": "low"}), "'loss' is low, which is no num"),
        (lambda root, state: fa.save(root, state, metrics={"a": 1}, best="a", mode="low"), "mode='low'"),
        (lambda root, state: fa.checkpoint.best(root), "no checkpoint was saved with best="),
        (lambda root, state: fa.checkpoint.best(root, "loss"), "saved with best='loss'"),
        (lambda root, state: fa.Evaluation(loss_fn, [1, 2]), "a list says nothing"),
        (lambda root, state: fa.Evaluation(loss_fn, shards(), every=0), "every=0"),
        (lambda root, state: fa.Evaluation(loss_fn, shards(), every=None), "every=None"),
        (lambda root, state: fa.Evaluation(loss_fn, shards(), patience=2), "patience=2 without best="),
        (lambda root, state: fa.Evaluation(loss_fn, shards(), best="x", keep_best=0), "keep_best=0"),
        (lambda root, state: fa.Autosave(root, every="day"), "every='day'"),
        (lambda root, state: fa.Tracking(every="day"), "every='day'"),
    ],
)
def test_mistakes(tmp_path, call, message):
    train_step = program()
    state = train_step.init()
    fa.save(tmp_path, state)
    with pytest.raises(ArgumentError, match=message.replace(".", r"\.")):
        call(tmp_path, state)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (lambda: [fa.Evaluation(loss_fn, shards()), fa.Evaluation(loss_fn, shards())], "have one name"),
        (lambda: [loss_fn], "a function says nothing of when"),
        (lambda: loss_fn, "a function says nothing of when to"),
        (lambda: fa.Evaluation(loss_fn, shards(), every=1, best="accuracy"), "no number 'eval/accuracy'"),
        (
            lambda: fa.Evaluation(lambda *_: {}, shards(), every=1, best="loss"),
            "return one from the metric fun",
        ),
    ],
)
def test_mistakes_in_a_loop(records, message):
    train_step = program()
    with pytest.raises(ArgumentError, match=message):
        list(fa.scan(train_step, train_step.init(), shards(), evaluate=records()))


def lines_of(capsys):
    """What a loop has written above its bar."""
    text = capsys.readouterr().err.replace("\r", "\n")
    return [line for line in text.splitlines() if line.startswith(("epoch", "resumed"))]


def test_a_bar_has_a_line_for_each_epoch_and_one_for_a_resumed_run(tmp_path, capsys):
    losses, weights = [], []
    for _ in range(2):  # two processes, one after the other
        train_step = program()
        state = fa.resume_or_init(tmp_path, train_step)
        for _ in range(2):
            for state, metrics in fa.scan(
                train_step,
                state,
                shards(10),
                progress=True,
                evaluate=fa.Evaluation(loss_fn, shards(), every=3),
                save=tmp_path,
            ):
                losses.append(float(metrics["loss"]) * metrics["weight"])
                weights.append(metrics["weight"])
        train_step.close()
    means = [sum(losses[at : at + 3]) / sum(weights[at : at + 3]) for at in range(0, 12, 3)]
    found = lines_of(capsys)
    assert [line.split("  ")[:2] for line in found if line.startswith("epoch")] == [
        [f"epoch {at + 1}/{at + 1}", f"loss {mean:.4g}"] for at, mean in enumerate(means)
    ]
    assert all("  eval/loss " in line for line in found if line.startswith("epoch"))
    assert [line for line in found if line.startswith("resumed")] == [
        "resumed at step 6, 0 samples into epoch 2"
    ]


def test_a_resumed_run_takes_rolled_back_rows_out_of_its_log(tmp_path):
    """It logged 1 to 5, and goes on from 3: 4 and 5 are not there twice. A run before it stays as it is."""

    def scanned(state, train_step, steps, save=None):
        track = fa.Tracking("jsonl", report=tmp_path / "run.html", directory=tmp_path)
        for _ in fa.scan(train_step, state, shards(), steps=steps, track=track, save=save):
            pass

    train_step = program()
    scanned(train_step.init(), train_step, 6)  # a run of its own, in the same file
    train_step.close()
    train_step = program()
    scanned(train_step.init(), train_step, 3, save=tmp_path / "saved")
    for last in (4, 5):  # each call of scan begins a part of its own in the file
        scanned(train_step.live_state, train_step, last)
    train_step.close()
    for last in (4, 6):
        train_step = program()
        scanned(fa.resume_or_init(tmp_path / "saved", train_step), train_step, last)
        train_step.close()
    rows = fa.track.read_jsonl(tmp_path / "logs" / "metrics.jsonl")
    assert [row["step"] for row in rows if "step" in row] == [*range(1, 7), *range(1, 7)]
    assert [row["config"].get("resumed_at") for row in rows if "config" in row] == [None, None, 3, 4, 3, 3]


@pytest.mark.parametrize("every", [3, "epoch"])
def test_the_loss_of_a_row_is_the_mean_since_the_row_before(every):
    """Batches of 4, 4 and 2 rows: their weights count."""
    train_step = program(fa.skip_nonfinite(loss_fn))
    losses = []
    track = fa.Tracking(rows := Rows(), every=every)
    for state, metrics in fa.scan(train_step, train_step.init(), shards(10), steps=6, track=track):
        weight = float(metrics["weight"])
        losses.append((float(metrics["loss"]) * weight, weight))
    for (_, row), at in zip(rows.rows, (0, 3), strict=True):
        sums, weights = (sum(column) for column in zip(*losses[at : at + 3], strict=True))
        assert row["loss"] == pytest.approx(sums / weights, rel=1e-6)
        assert row["weight"] == losses[at + 2][1]
    assert state.step == 6


def test_another_metric_begins_with_its_own_best(tmp_path):
    by_loss = fa.Evaluation(scripted, shards(), every=1, best="loss", patience=9)
    run(by_loss, tmp_path, steps=4)
    found, _, last = run(attrs.evolve(by_loss, mode="max", patience=2), tmp_path, steps=13)
    assert last == 9  # NaN, 3, 8, 3, 2.9: the first number is an improvement on nothing
    assert sorted(found) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [3, 4])
def test_a_window_that_crosses_an_epoch_ends_it(tmp_path, window):
    """Five batches an epoch."""
    train_step = program()
    val = fa.Evaluation(loss_fn, shards())
    loader = DataLoader(TensorDataset(*batch_of(20)), batch_size=4)
    data = fa.shard(loader, window=window, across_epochs=True)
    track = fa.Tracking(rows := Rows(), every="epoch")
    save = fa.Autosave(tmp_path, every="epoch")
    steps = [
        state.step
        for state, metrics in fa.scan(
            train_step, train_step.init(), data, epochs=4, evaluate=val, track=track, save=save
        )
        if "eval/loss" in metrics
    ]
    assert [step for step, _ in rows.rows] == steps
    assert [each.step for each in fa.checkpoint.checkpoints(tmp_path)] == steps
    assert len(steps) == 4
    assert steps[0] == -(-5 // window)


def test_the_epoch_of_several_updates_on_a_batch_ends_once(capsys):
    train_step = program()
    track = fa.Tracking(rows := Rows(), every="epoch")
    for _ in fa.scan(
        train_step, train_step.init(), shards(), epochs=2, updates_per_batch=3, track=track, progress=True
    ):
        pass
    assert [step for step, _ in rows.rows] == [6, 12]
    assert len(lines_of(capsys)) == 2


def other_names():
    """A metric has another name on each rank."""
    train_step = program(strategy="ddp")
    state = train_step.init()
    rank = train_step.mesh.batch_rank

    def named(model, batch):
        return {f"from_{rank}": fa.Mean(model(batch[0]).sum(), weight=len(batch[0]))}

    shards = fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))
    with pytest.raises(fa.errors.RankMismatchError, match="from_0"):
        fa.evaluate(train_step, state, named, shards)


def test_ranks_with_other_names_of_metrics_raise(pools):
    pools.run(2, other_names)
