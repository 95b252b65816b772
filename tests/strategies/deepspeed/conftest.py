"""These tests run DeepSpeed itself; where it is not installed they skip, and say so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("deepspeed") is not None:
        return
    for item in items:
        if "/deepspeed/" in item.nodeid and "test_config" not in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="deepspeed is not installed"))


@pytest.fixture(scope="module", autouse=True)
def ready(request):
    if "test_config" not in request.node.nodeid:
        request.getfixturevalue("compiled")


@pytest.fixture(scope="session")
def compiled():
    """Let DeepSpeed compile its communication extension before ranks with a time limit need it.

    In a process of its own: the one that forks ranks imports no more than they need.
    """
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=280)
