"""What a call of `log` may hold: text, nested values, options of the call, and no step."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fnaccel as fa
from fnaccel.errors import ArgumentError, UnknownNameError
from fnaccel.seeing.runs import read_run
from fnaccel.track import DVCLiveTracker, MLflowTracker, read_jsonl
from fnaccel.track import log as log_module
from fnaccel.track.fetcher import Fetcher
from tests.tiny_models import program
from tests.track.test_failing import shards
from tests.track.test_scan import Kept


class Urgent(Kept):
    """A tracker whose `log` has an option."""

    def log(self, step, metrics, urgent=False, *, colour="red"):
        self.said.append((step, dict(metrics), urgent, colour))


class Any(Kept):
    """A tracker whose `log` takes all options."""

    def log(self, step, metrics, **options):
        self.said.append((step, dict(metrics), options))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("fnaccel.track.registry._registered", {})
    monkeypatch.chdir(tmp_path)
    with fa.start(device="cpu"):
        yield tmp_path


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def rows_of(tracker):
    return [row for row in tracker.said if row != "finish" and row[0] != "start"]


# -- values ------------------------------------------------------------------------------------------------------


def test_text_and_nested_values_reach_each_tracker(caplog):
    mine = Kept()
    with fa.tracked(fa.Tracking("jsonl", mine, directory="a")) as run:
        run.log(1, {"loss": torch.tensor(0.5), "note": "warm", "eval": {"top": {"1": 0.25}}, "best": None})
    given = {"loss": 0.5, "note": "warm", "eval/top/1": 0.25, "best": None}
    assert rows_of(mine) == [(1, given)]
    [record] = read_jsonl("a/logs/metrics.jsonl")[1:]
    assert {name: record[name] for name in given} == given
    assert lines(caplog) == []


def test_tensorboard_writes_text_and_names_the_rest_once(caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (
        caplog.at_level(logging.WARNING, "fnaccel"),
        fa.tracked(fa.Tracking("tensorboard", directory="a")) as run,
    ):
        for step in (1, 2):
            run.log(step, {"loss": 0.5, "note": "warm", "rows": [1, 2], "size": np.int64(3)})
        run.log(3, {"rows": [1], "hist": np.ones(2)})
    events = EventAccumulator("a/logs").Reload()
    assert [event.value for event in events.Scalars("size")] == [3.0, 3.0]
    notes = events.Tensors("note/text_summary")
    assert [(note.step, note.tensor_proto.string_val[0]) for note in notes] == [(1, b"warm"), (2, b"warm")]
    assert lines(caplog) == [
        "TensorBoardTracker leaves out the metric 'rows': list is no number and no text. "
        "Numbers, tensors of one element and text are written",
        "TensorBoardTracker leaves out the metric 'hist': ndarray is no number and no text. "
        "Numbers, tensors of one element and text are written",
    ]


def test_tensors_of_several_elements_are_named_once(caplog):
    mine = Kept()
    with caplog.at_level(logging.WARNING, "fnaccel"), fa.tracked(mine) as run:
        for step in (1, 2):
            run.log(step, {"loss": 0.5, "hist": torch.ones(2, 3)})
        assert run.failures == {}
    assert rows_of(mine) == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    [line] = lines(caplog)
    assert line.startswith("the log leaves out the metric 'hist': it is a tensor of shape (2, 3)")


def loss_with_parts(model, batch):
    x, y = batch
    errors = F.mse_loss(model(x), y, reduction="none")
    parts = {"first": errors.detach().sum(), "rows": fa.Concat(errors.detach())}
    return fa.Mean(errors.sum(), weight=y.numel(), aux={"parts": parts})


def test_metrics_of_a_step_follow_the_same_way(caplog):
    mine, through = Kept(), Kept()
    train_step = program(loss_with_parts)
    with fa.tracked(through) as run:
        for _ in fa.scan(train_step, train_step.init(), shards(), steps=1, track=[mine, run]):
            pass
    [(step, values)] = rows_of(mine)
    assert step == 1
    assert rows_of(through) == [(step, values)]
    assert {"loss", "parts/first"} <= values.keys()
    assert [line.split(":")[0] for line in lines(caplog)] == 2 * [
        "the log leaves out the metric 'parts/rows'"
    ]


def test_jsonl_writes_plain_values_and_names_the_rest_once(caplog):
    with caplog.at_level(logging.WARNING, "fnaccel"), fa.tracked(fa.Tracking("jsonl", directory="a")) as run:
        for step in (1, 2):
            run.log(
                step, {"words": ["a", 1, None], "set": {1}, "deep": [[torch.ones(2)]], "size": np.int64(3)}
            )
    for record in read_jsonl("a/logs/metrics.jsonl")[1:]:
        assert record["words"] == ["a", 1, None]
        assert record["size"] == 3
        assert record.keys() == {"step", "time", "words", "size"}
    assert [line.split(".")[0] for line in lines(caplog)] == [
        "JsonlTracker leaves out the metric 'set': JSON can't hold this set",
        "JsonlTracker leaves out the metric 'deep': JSON can't hold this list",
    ]


def test_a_weight_that_is_text_is_no_weight():
    mine = Kept()
    with fa.tracked(mine) as run:
        run.log(1, {"weight": "heavy"})
        with pytest.raises(fa.errors.LossError):
            run.log(2, {"weight": -1.0})
    assert rows_of(mine) == [(1, {"weight": "heavy"})]


# -- steps -------------------------------------------------------------------------------------------------------


def test_a_call_without_a_step_takes_the_last_one():
    mine = Kept()
    with fa.tracked(mine) as run:
        run.log({"a": 1.0})
        run.log({"a": 2.0})
        run.log(7, {"a": 3.0})
        run.log({"b": 4.0})
        run.log(np.int64(9), {"a": 5.0})
        run.log({"b": 6.0})
    assert [(step, *values.values()) for step, values in rows_of(mine)] == [
        (0, 1.0), (1, 2.0), (7, 3.0), (7, 4.0), (9, 5.0), (9, 6.0),
    ]  # fmt: skip


class Late(Fetcher):
    """A device whose copies arrive late, as on an accelerator."""

    def arrived(self, *, wait=False):
        return super().arrived(wait=wait) if wait else iter(())


def test_rows_of_scan_and_of_its_body_keep_their_order(monkeypatch):
    """On an accelerator the rows of scan arrive some steps later."""
    monkeypatch.setattr(log_module, "Fetcher", Late)
    mine = Kept()
    train_step = program()
    with fa.tracked(mine) as run:
        for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=3, track=run):
            run.log({"seen": state.step})
    steps = [(step, "seen" in values) for step, values in rows_of(mine)]
    assert steps == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    assert all(values.get("seen", step) == step for step, values in rows_of(mine))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3,), "the metrics are int"),
        (("loss", 0.5), "the step is 'loss'"),
        ((1.5, {"loss": 0.5}), "the step is 1.5"),
        ((True, {"loss": 0.5}), "the step is True"),
        ((1, [("loss", 0.5)]), "the metrics are list"),
    ],
)
def test_a_call_of_the_wrong_kind(arguments, says):
    mine = Kept()
    with fa.tracked(mine) as run, pytest.raises(ArgumentError, match=says) as raised:
        run.log(*arguments)
    assert "state.step" in raised.value.fix
    assert rows_of(mine) == []


# -- options of one call -----------------------------------------------------------------------------------------


def test_options_go_to_the_tracker_of_that_name():
    urgent, whole, plain = Urgent(), Any(), Kept()
    with fa.tracked(fa.Tracking(urgent, whole, plain, "jsonl", directory="a")) as run:
        run.log(
            1,
            {"a": 1.0},
            options={"Urgent": {"urgent": True}, "Any": {"step_": 3}, "wandb": {"commit": True}},
        )
        run.log({"a": 2.0}, options={"Urgent": {"colour": "blue"}})
        run.log(2, {"a": 3.0})
        assert run.failures == {}
    assert rows_of(urgent) == [
        (1, {"a": 1.0}, True, "red"), (1, {"a": 2.0}, False, "blue"), (2, {"a": 3.0}, False, "red"),
    ]  # fmt: skip
    assert rows_of(whole) == [(1, {"a": 1.0}, {"step_": 3}), (1, {"a": 2.0}, {}), (2, {"a": 3.0}, {})]
    assert rows_of(plain) == [(1, {"a": 1.0}), (1, {"a": 2.0}), (2, {"a": 3.0})]


def test_a_registered_name_takes_options_too():
    fa.track.register("urgent", Urgent)
    with fa.tracked("urgent") as run:
        run.log(1, {"a": 1.0}, options={"urgent": {"urgent": True}})
        [tracker] = run.trackers
    assert rows_of(tracker) == [(1, {"a": 1.0}, True, "red")]


@pytest.mark.parametrize("name", ["tensorboard", "TensorBoardTracker"])
def test_an_option_of_a_library_reaches_its_call(name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with fa.tracked(fa.Tracking("tensorboard", directory="a")) as run:
        run.log(1, {"loss": 0.5}, options={name: {"walltime": 12.5}})
    assert EventAccumulator("a/logs").Reload().Scalars("loss")[0].wall_time == 12.5


@pytest.mark.parametrize(
    ("options", "kind", "says", "fix"),
    [
        ({"urgnt": {}}, UnknownNameError, "no tracker is called 'urgnt'", "did you mean 'Urgent'"),
        ({"mlflw": {"a": 1}}, UnknownNameError, "no tracker is called 'mlflw'", "did you mean 'mlflow'"),
        ({"Urgent": {"urgnt": 1}}, ArgumentError, "Urgent.log has no option 'urgnt'", "did you mean 'urgent'"),
        ({"Urgent": {"step": 1}}, ArgumentError, "Urgent.log has no option 'step'", "colour, urgent"),
        ({"jsonl": {"a": 1}}, ArgumentError, "JsonlTracker.log takes no options", "def log(self, step, metrics, a="),
        ({"Kept": {"a": 1}}, ArgumentError, "Kept.log takes no options", "def log(self, step, metrics, a=None)"),
        ({"tensorboard": {"wall": 1}}, ArgumentError, "has no option 'wall'", "walltime"),
        ({"tensorboard": {"global_step": 1}}, ArgumentError, "has no option 'global_step'", "walltime"),
        ({"Urgent": True}, ArgumentError, "is no mapping", "options={"),
        ([1], ArgumentError, "is no mapping", "options={"),
    ],
)  # fmt: skip
def test_mistakes_in_options_write_nothing(options, kind, says, fix):
    urgent, kept = Urgent(), Kept()
    with fa.tracked(fa.Tracking(urgent, kept, "jsonl", "tensorboard", directory="a")) as run:
        with pytest.raises(kind, match=says.replace("(", r"\(")) as raised:
            run.log(1, {"a": 1.0}, options=options)
        run.log({"b": 1.0})
    assert fix in raised.value.fix
    assert raised.value.where.startswith("run.log of fa.tracked")
    assert rows_of(urgent) == [(0, {"b": 1.0}, False, "red")]
    assert rows_of(kept) == [(0, {"b": 1.0})]
    assert len(read_jsonl("a/logs/metrics.jsonl")) == 2


def test_a_rank_without_trackers_knows_their_names():
    world = fa.start(device="cpu")
    with fa.tracked(fa.Tracking({"name": "jsonl", "ranks": "main"}, directory="a"), world=world) as run:
        run._trackers = ()  # as on another rank
        run.log(1, {"a": 1.0}, options={"jsonl": {"a": 1}})
        with pytest.raises(UnknownNameError):
            run.log(1, {"a": 1.0}, options={"jsnl": {}})


# -- what fa.scan knows of a run that is open --------------------------------------------------------------------


class Told(Kept):
    """A tracker that takes more of the config after `start`."""

    def add_config(self, config):
        self.said.append(("config", dict(config)))


def test_scan_gives_an_open_run_the_plan_and_the_environment(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain, told, train_step = Kept(), Told(), program()
    track = fa.Tracking(
        "jsonl", "tensorboard", plain, told, config={"lr": 0.5}, report="page.html", directory="a"
    )
    with fa.tracked(track) as run:
        run.log(3, {"baseline": 0.5})
        for _ in fa.scan(train_step, train_step.init(), shards(), steps=1, track=run):
            pass
    assert [row[0] for row in plain.said[:3]] == ["start", 3, 1]
    _, (_, config) = [row for row in told.said if row[0] in ("start", "config")]
    assert (config["plan"], config["environment"]["ranks"]) == (str(train_step.plan), "1")
    first, _, more, *_ = read_jsonl("a/logs/metrics.jsonl")
    assert (first["config"], more["config"], more["more"]) == ({"lr": 0.5}, config, True)
    shown = EventAccumulator("a/logs").Reload().Tensors("plan/text_summary")
    assert [text.tensor_proto.string_val[0].decode() for text in shown] == [config["plan"]]
    found = read_run("page.jsonl")
    assert (found.config, found.restarts) == ({"lr": 0.5, **config}, ())
    assert "train step of" in (folder / "page.html").read_text()


def test_names_of_patterns_reach_mlflow_and_dvclive():
    """MLflow takes few characters in a name, and DVCLive keeps a tree in which `lr` is a number."""
    written = {}
    mlflow = SimpleNamespace(
        MlflowClient=SimpleNamespace, log_metrics=lambda numbers, **_: written.update(mlflow=numbers)
    )
    live = SimpleNamespace(log_metric=lambda name, value: written.update({name: value}), sync=lambda: None)
    metrics = {"lr": 0.1, "lr/[ab]*bias": 0.2}
    first, second = MLflowTracker(), DVCLiveTracker()
    first._library, first._run = mlflow, SimpleNamespace(info=SimpleNamespace(run_id="0"))
    second._run = live
    first.log(1, metrics)
    second.log(1, {**metrics, "eval/loss": 0.5})
    assert written.pop("mlflow") == {"lr": 0.1, "lr/_ab__bias": 0.2}
    assert written == {"lr": 0.1, "lr.[ab]*bias": 0.2, "eval/loss": 0.5}
