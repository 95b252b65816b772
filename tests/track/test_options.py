"""Options of trackers: unknown ones are named, and `offline` means the same for all ten."""

from __future__ import annotations

import os

import pytest

import fnaccel as fa
from fnaccel.errors import ArgumentError
from fnaccel.track.registry import BUILT_IN

NAMES = tuple(BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_each_tracker_takes_offline(name, tmp_path):
    for offline in (True, False, None):
        tracker = fa.track.of(name, directory=tmp_path, offline=offline)
        options = getattr(tracker, "options", {})
        wanted = {True: ("offline", False), False: ("online", True), None: (None, None)}[offline]
        if "mode" in options:
            assert options["mode"] == wanted[0]
        if "online" in options:
            assert options["online"] is wanted[1]
    with pytest.raises(ArgumentError, match="offline='yes'"):
        fa.track.of(name, directory=tmp_path, offline="yes")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wandb", {"mode": "online"}), ("swanlab", {"mode": "online"}), ("comet", {"online": True}),
        ("aim", {"directory": "aim://host:53800"}), ("mlflow", {"tracking_uri": "http://host:5000"}),
        ("trackio", {"space_id": "a/b"}), ("trackio", {"server_url": "http://host"}),
    ],
)  # fmt: skip
def test_offline_beside_a_server_raises(name, options):
    with pytest.raises(ArgumentError, match=r"offline=True and .*=") as raised:
        fa.track.of(name, offline=True, **options)
    assert next(iter(options)) in raised.value.what


@pytest.mark.parametrize("uri", [None, "sqlite:///a.db", "runs/a"])
def test_mlflow_takes_local_uris_offline(uri):
    fa.track.of("mlflow", offline=True, tracking_uri=uri)


def test_an_unknown_option_of_a_class_is_named():
    with pytest.raises(ArgumentError, match="the tracker jsonl has no option 'colour'") as raised:
        fa.track.of("jsonl", colour="red")
    assert raised.value.fix == "choose one of: directory, offline, path, ranks"


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_unknown_option_of_a_library_is_named(name, tmp_path):
    check_unknown(name, tmp_path)


def check_unknown(name, folder):
    """Start a tracker with an option that its library does not have. tests/trackers calls it for the others."""
    tracker = fa.track.of(name, directory=folder, offline=True, colours="red")
    before = {key for key in os.environ if key.endswith("_DIR")}
    with pytest.raises(ArgumentError, match=f"{type(tracker).__name__} has no option 'colours'") as raised:
        tracker.start({})
    assert "ranks" in raised.value.fix
    assert {key for key in os.environ if key.endswith("_DIR")} == before, "a folder of a start that failed"
