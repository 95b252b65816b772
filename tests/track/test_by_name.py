"""Trackers by name: the registry, `fa.Tracking`, `fa.tracked`, and the section `tracking` of recipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import fnaccel as fa
from fnaccel.config.yaml import override
from fnaccel.errors import ArgumentError, ConfigError, UnknownNameError
from fnaccel.seeing import logging as log_level
from fnaccel.track import JsonlTracker, TensorBoardTracker, read_jsonl, registry
from tests.tiny_models import batch_of, program

ROOT = Path(__file__).parents[2]


class ListTracker:
    """A tracker of one's own, which keeps its rows in a list of the class."""

    rows: ClassVar[list] = []
    folders: ClassVar[list] = []

    def __init__(self, *, directory=None, label="none"):
        type(self).folders.append((str(directory), label))

    def start(self, config):
        type(self).rows.append(sorted(config))

    def log(self, step, metrics):
        type(self).rows.append(step)

    def finish(self):
        type(self).rows.append("finish")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    ListTracker.rows, ListTracker.folders = [], []
    with fa.start(device="cpu"):
        yield


def train(**options):
    from torch.utils.data import DataLoader, TensorDataset

    shards = fa.shard(DataLoader(TensorDataset(*batch_of(12)), batch_size=4))
    train_step = program()
    return [state.step for state, _ in fa.scan(train_step, train_step.init(), shards, **options)]


def steps_of(path):
    return [record["step"] for record in read_jsonl(path) if "step" in record]


def test_a_name_writes_to_runs_or_to_logs_in_the_directory_of_the_run():
    train(track="jsonl")
    train(track=["jsonl", {"name": "tensorboard"}], save="a")
    train(track={"name": "jsonl", "directory": "b"}, save="a")
    train(track=fa.Tracking("jsonl", directory="d"), save="a")
    train(track=[{"name": "jsonl", "path": "c.jsonl"}])
    train(track=None)
    for path in (
        "runs/metrics.jsonl",
        "a/logs/metrics.jsonl",
        "b/metrics.jsonl",
        "c.jsonl",
        "d/logs/metrics.jsonl",
    ):
        assert steps_of(path) == [1, 2, 3], path
    assert len(list(Path("a/logs").glob("events.out.tfevents.*"))) == 1


def test_names_objects_and_mappings_mix():
    fa.track.register("list", ListTracker)
    train(track=fa.Tracking({"name": "list", "label": "x"}, JsonlTracker("d.jsonl"), "jsonl", every=2))
    assert [row for row in ListTracker.rows if isinstance(row, int)] == [2]
    assert ListTracker.rows[-1] == "finish"
    assert steps_of("d.jsonl") == steps_of("runs/metrics.jsonl") == [2]
    assert ListTracker.folders == [("runs", "x")]


def test_all_stands_for_those_that_are_installed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda name: seen.append(name)
    )  # nothing is there
    fa.track.register("list", ListTracker)
    assert fa.track.installed() == ("jsonl", "list")
    assert len(seen) == 9
    train(track=["all", JsonlTracker("mine.jsonl")])
    assert ListTracker.rows[-1] == "finish"
    assert steps_of("mine.jsonl") == [1, 2, 3]
    assert not Path("runs").exists(), "there is a JsonlTracker already"


@pytest.mark.long
def test_those_installed_are_found_without_an_import():
    code = "import sys, fnaccel.track as t; print(t.installed(), {'wandb', 'tensorboard'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"jsonl", "tensorboard", "wandb"} <= {*fa.track.installed()}
    assert done.stdout.strip() == f"{fa.track.installed()} set()"


def test_a_registered_name_hides_a_built_in_one_and_says_so():
    with pytest.warns(UserWarning, match="'wandb' takes the place of the built-in one"):
        fa.track.register("wandb", ListTracker)
    fa.track.register("wandb", ListTracker)  # the same again
    with pytest.warns(UserWarning, match="'wandb' takes the place of one that was registered before"):
        fa.track.register("wandb", lambda: ListTracker())
    with pytest.warns(UserWarning, match="takes the place"):
        fa.track.register("wandb", ListTracker)
    assert isinstance(fa.track.of("wandb"), ListTracker)
    assert isinstance(fa.track.of(ListTracker, label="y"), ListTracker)
    assert fa.track.of("jsonl").path == Path("runs/metrics.jsonl")


@pytest.mark.parametrize(
    ("trackers", "kind", "text"),
    [
        ("tensorbord", UnknownNameError, "did you mean 'tensorboard'"),
        ([{"name": "jsnl"}], UnknownNameError, "did you mean 'jsonl'"),
        ({"directory": "x"}, ArgumentError, "name no tracker"),
        ({"name": "jsonl", "colour": "red"}, ArgumentError, "has no option 'colour'"),
        (JsonlTracker, ArgumentError, "the class JsonlTracker is no tracker"),
        ([3], ArgumentError, "int is no tracker"),
    ],
)
@pytest.mark.parametrize("function", ["scan", "tracked"])
def test_mistakes(trackers, kind, text, function):
    with pytest.raises(kind, match=text) as raised:
        {"scan": train, "tracked": open_by_hand}[function](track=trackers)
    assert raised.value.where.startswith((f"fa.{function}", "fa.Tracking", "trackers"))


def open_by_hand(track):
    with fa.tracked(track):
        raise AssertionError("it was opened")


@pytest.mark.parametrize("name", ["", "all", "a:b", 3])
def test_names_that_cannot_be_registered(name):
    with pytest.raises(ArgumentError, match="no name and class"):
        fa.track.register(name, ListTracker)
    with pytest.raises(ArgumentError, match="no name and class"):
        fa.track.register("mine", 3)
    with pytest.raises(ArgumentError, match="dict has no method log"):
        fa.track.register("mine", dict)


def test_a_loop_by_hand(caplog):
    caplog.set_level("WARNING", "fnaccel")
    with fa.tracked(fa.Tracking("jsonl", TensorBoardTracker("tb"), config={"lr": 0.5}, directory="a")) as run:
        run.log(1, {"loss": torch.tensor(0.5), "rows": 3, "text": "warm"})
        run.log(2, {"loss": torch.tensor(0.25, requires_grad=True)})
        run.log_images(2, "x", torch.zeros(1, 2, 2))
        assert not caplog.messages
        for _ in range(2):
            run.log_artifact(__file__)  # neither tracker keeps files
        assert caplog.messages == [
            "log_artifact() writes nothing: no such method in JsonlTracker, TensorBoardTracker"
        ]
        assert [type(tracker).__name__ for tracker in run.trackers] == ["JsonlTracker", "TensorBoardTracker"]
        assert run.failures == {}
    first, *rest = read_jsonl("a/logs/metrics.jsonl")
    assert first["config"] == {"lr": 0.5}
    assert [(each["step"], each["loss"], each.get("rows"), each.get("text")) for each in rest] == [
        (1, 0.5, 3, "warm"),
        (2, 0.25, None, None),
    ]
    with pytest.raises(ArgumentError, match="not started"):
        run.trackers[0].log(3, {})


def test_an_error_in_the_block_ends_the_trackers():
    fa.track.register("list", ListTracker)
    with pytest.raises(RuntimeError, match="mine"), fa.tracked("list"):
        raise RuntimeError("mine")
    assert ListTracker.rows == [[], "finish"]


# -- recipes ---------------------------------------------------------------------------------------------------

YAML = """\
checkpoint:
  directory: a
tracking:
  trackers:
  - jsonl
  - name: tests.track.test_by_name:ListTracker
    label: z
  log_every: 2
  level: info
"""


def test_a_recipe_round_trips_and_trains():
    recipe = fa.config.from_yaml(YAML)
    assert fa.config.to_yaml(recipe) == YAML
    assert fa.config.from_yaml(fa.config.to_yaml(recipe)) == recipe
    train(**fa.config.scan_options(recipe))
    assert steps_of("a/logs/metrics.jsonl") == [2]
    assert ListTracker.rows[1:] == [2, "finish"]
    assert ListTracker.folders == [(str(Path("a/logs").absolute()), "z")]


def test_a_recipe_in_python_takes_one_name_and_fields_can_be_set():
    recipe = fa.config.Recipe(tracking=fa.config.TrackingRecipe(trackers="jsonl"))
    assert recipe.tracking.trackers == ("jsonl",)
    changed = override(recipe, {"tracking.trackers": ["all"], "tracking.log_every": 5})
    assert fa.config.scan_options(changed) == {"track": fa.Tracking("all", every=5)}
    assert fa.config.scan_options(fa.config.Recipe()) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tracking: {trackres: [jsonl]}", "did you mean 'trackers'"),
        ("tracking: {trackers: [{directory: x}]}", "names no tracker"),
        ("tracking: {trackers: [3]}", "names no tracker"),
        ("tracking: {log_every: 0}", "log_every is 1 or more"),
        ("tracking: {level: inof}", "did you mean 'info'"),
    ],
)
def test_mistakes_in_a_recipe(text, words):
    with pytest.raises((ConfigError, ArgumentError), match=words):
        fa.config.from_yaml(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [("jsnol", "did you mean 'jsonl'"), ("no_such_module:Tracker", "nothing that can be imported")],
)
def test_mistakes_that_scan_options_finds(name, words):
    recipe = fa.config.Recipe(tracking=fa.config.TrackingRecipe(trackers=[name]))
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        fa.config.scan_options(recipe)


def test_a_recipe_sets_the_level_of_log_lines():
    try:
        fa.config.recipe(fa.config.Recipe(tracking=fa.config.TrackingRecipe(level="debug")))
        assert log_level.get_level() == 10
        fa.config.recipe(fa.config.Recipe())
        assert log_level.get_level() == 10, "a recipe without a level leaves it"
    finally:
        log_level.set_level(None)
    assert log_level.get_level() is None


@pytest.mark.parametrize("trackers", [["jsonl", "jsonl"], ["jsonl", {"name": "jsonl"}]])
def test_a_tracker_that_is_given_twice_raises(trackers, tmp_path):
    """Both would write the same rows to one file."""
    with fa.start(), pytest.raises(ArgumentError, match="'jsonl' is given twice"):
        fa.Tracking(*trackers).opened("here", tmp_path)
