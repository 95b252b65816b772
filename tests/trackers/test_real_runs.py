"""A real run with each tracker that needs an environment of its own. `make test-trackers` runs them."""

from __future__ import annotations

import pytest

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
