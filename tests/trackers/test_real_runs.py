"""A real run with each tracker that needs an environment of its own. `make test-trackers` runs them."""

from __future__ import annotations

import pytest

from tests.track import full_disk, real_run
from tests.track.test_options import check_unknown
from tests.track.test_real_runs import MEDIA, check, compare

CLEARML = {
    "offline": True,
    "auto_connect_frameworks": False,
    "auto_connect_arg_parser": False,
    "auto_resource_monitoring": False,
}
AIM = {"offline": True, "system_tracking_interval": None, "capture_terminal_logs": False}
COMET = {"offline": True, "project": "checks", "run_name": "first", "tags": ["a"], "log_code": False}
ALL = (*MEDIA, "artifact")
pytestmark = [
    pytest.mark.long,
    pytest.mark.environment(".venv-trackers/.trackers", ".venv-trackers/bin/python"),
]


@pytest.mark.parametrize(
    ("name", "options", "abilities", "native"),
    [
        ("aim", AIM, ALL, "aim.sdk.run Run"),
        ("clearml", CLEARML, ALL, "clearml.task Task"),
        ("comet", COMET, ALL, "comet_ml.offline OfflineExperiment"),
        ("dvclive", {"dvcyaml": False, "offline": True}, MEDIA, "dvclive.live Live"),
        (
            "mlflow",
            {"offline": True, "run_name": "first", "tags": {"a": "b"}},
            ALL,
            "mlflow.tracking.fluent ActiveRun",
        ),
        ("swanlab", {"offline": True, "project": "checks"}, MEDIA, "swanlab.sdk.internal.run Run"),
        ("trackio", {"auto_log_cpu": False, "offline": True}, ALL, "trackio.run Run"),
    ],
)
def test_a_real_run_is_read_back(tmp_path, name, options, abilities, native):
    assert f"NATIVE {native}" in check(name, tmp_path, abilities=abilities, **options)


@pytest.mark.filterwarnings("ignore:The ``declarative_base")  # Aim's tables, when it is imported here first
@pytest.mark.parametrize("name", ["aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "trackio"])
def test_an_unknown_option_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_unknown(name, tmp_path)


OFFLINE = {
    "WANDB_MODE": "offline",
    "COMET_START_ONLINE": "false",
    "COMET_PROJECT_NAME": "checks",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}


def test_all_that_are_installed_log_one_run(tmp_path):
    """By `trackers="all"`, with the defaults of each, in one process."""
    assert "FAILURES {}" in real_run.start("all", tmp_path, env=OFFLINE)
    for name in ("aim", "comet", "mlflow", "trackio", "wandb"):
        compare(name, tmp_path, ALL)
    compare("clearml", tmp_path, ALL, digits=7)  # it takes the rounded values of TensorBoard too
    for name in ("dvclive", "swanlab", "tensorboard"):
        compare(name, tmp_path, MEDIA)


@pytest.mark.parametrize(
    ("name", "size", "options", "failing"),
    [
        ("clearml", "256k", CLEARML, ()),  # a thread of ClearML logs the error
        ("comet", "256k", COMET, ()),  # a thread of Comet logs the error
        ("dvclive", "256k", {"dvcyaml": False}, ("DVCLiveTracker",)),
        ("mlflow", "4M", {}, ("MLflowTracker",)),
        ("swanlab", "256k", {"mode": "offline"}, ("SwanLabTracker",)),
        ("trackio", "2M", {"auto_log_cpu": False}, ()),  # Trackio warns
    ],
)
def test_a_full_disk_does_not_end_training(tmp_path, name, size, options, failing):
    """Aim goes on training too, and then its clean-up waits for minutes when the process ends."""
    failures, _ = full_disk.start(name, tmp_path, size, **options)
    assert tuple(failures) == failing
