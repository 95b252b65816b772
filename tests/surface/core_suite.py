"""A plugin of pytest for a copy of the package without its tenants: tests that use one are not of the core suite."""

import collections

import pytest

COUNTS = collections.Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Take a test out of the suite if it failed because the copy lacks a tenant."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and "this copy of fnaccel has no fnaccel." in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "it uses a tenant")
        COUNTS["left out"] += 1
    elif report.when == "call":
        COUNTS[report.outcome] += 1


def pytest_sessionfinish():
    """Print the counts, for the test that started this run."""
    print("\ncounts", COUNTS["passed"], COUNTS["left out"])
