"""A plugin of pytest that writes each row's seconds and outcome to the file in FNACCEL_ROW_RECORD, as JSON lines."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs
import pytest

VARIABLE = "FNACCEL_ROW_RECORD"


@attrs.frozen
class Result:
    """What one row did: passed, failed or skipped, and the seconds of its setup, call and teardown."""

    id: str
    outcome: str
    seconds: float


class Recorder:
    """Appends a line for each row after its last report, or at once if it failed: its teardown might not end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the report of a setup, call or teardown."""
        reports = self.reports[report.nodeid]
        reports.append(report)
        failures = sum(each.failed for each in reports)
        if (report.failed and failures == 1) or (report.when == "teardown" and failures == 0):
            with self.path.open("a") as file:
                file.write(json.dumps(attrs.asdict(_result(report.nodeid, reports))) + "\n")


def _result(name: str, reports: list[pytest.TestReport]) -> Result:
    outcomes = {report.outcome for report in reports}
    outcome = next(found for found in ("failed", "skipped", "passed") if found in outcomes)
    return Result(name, outcome, sum(report.duration for report in reports))


def pytest_configure(config: Any) -> None:
    """Record in the process that prints the results, and not in the workers of xdist."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[VARIABLE])))


def read(path: Path) -> list[Result]:
    """The results in a file, or none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]
