from __future__ import annotations

import pytest

import fnaccel as fa


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started
