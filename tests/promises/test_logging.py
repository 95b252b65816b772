"""Lines of a log name the place of the call, and not a line of ours."""

from __future__ import annotations

import logging

import pytest

import fnaccel as fa


def speak(logger, **options):
    logger.warning("here", **options)


@pytest.mark.parametrize(
    ("options", "function"),
    [({}, "speak"), ({"stacklevel": 2}, "test_lines_name_the_place_of_the_call")],
    ids=["the call", "its caller"],
)
def test_lines_name_the_place_of_the_call(caplog, options, function):
    for logger in (fa.seeing.get_logger("promises"), logging.getLogger("promises")):
        speak(logger, **options)
    ours, pythons = caplog.records
    assert ours.funcName == pythons.funcName == function
    assert ours.pathname == pythons.pathname == __file__
    if not options:
        assert ours.lineno == pythons.lineno
