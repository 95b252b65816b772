"""A real run with each tracker that needs an environment of its own. `make test-trackers` runs them."""

from __future__ import annotations

import pytest

from tests.track import full_disk
from tests.track.test_real_runs import MEDIA, check

CLEARML = {
    "offline": True,
    "auto_connect_frameworks": False,
    "auto_connect_arg_parser": False,
    "auto_resource_monitoring": False,
}
AIM = {"system_tracking_interval": None, "capture_terminal_logs": False}
COMET = {"online": False, "project": "checks", "run_name": "first", "tags": ["a"], "log_code": False}
ALL = (*MEDIA, "artifact")


@pytest.mark.parametrize(
    ("name", "options", "abilities", "native"),
    [
        ("aim", AIM, ALL, "aim.sdk.run Run"),
        ("clearml", CLEARML, ALL, "clearml.task Task"),
        ("comet", COMET, ALL, "comet_ml.offline OfflineExperiment"),
        ("dvclive", {"dvcyaml": False}, MEDIA, "dvclive.live Live"),
        ("mlflow", {"run_name": "first", "tags": {"a": "b"}}, ALL, "mlflow.tracking.fluent ActiveRun"),
        ("swanlab", {"mode": "offline", "project": "checks"}, MEDIA, "swanlab.sdk.internal.run Run"),
        ("trackio", {"auto_log_cpu": False}, ALL, "trackio.run Run"),
    ],
)
def test_a_real_run_is_read_back(tmp_path, name, options, abilities, native):
    assert f"NATIVE {native}" in check(name, tmp_path, abilities=abilities, **options)


@pytest.mark.parametrize(
    ("name", "size", "options", "failing"),
    [
        ("comet", "256k", COMET, ()),  # a thread of Comet logs the error
        ("dvclive", "256k", {"dvcyaml": False}, ("DVCLiveTracker",)),
        ("mlflow", "4M", {}, ("MLflowTracker",)),
        ("swanlab", "256k", {"mode": "offline"}, ("SwanLabTracker",)),
        ("trackio", "2M", {"auto_log_cpu": False}, ()),  # Trackio warns
    ],
)
def test_a_full_disk_does_not_end_training(tmp_path, name, size, options, failing):
    """Aim and ClearML go on training too, and then wait for minutes when the process ends."""
    failures, _ = full_disk.start(name, tmp_path, size, **options)
    assert tuple(failures) == failing
