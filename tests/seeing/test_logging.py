"""`fa.seeing.get_logger` in processes of their own: levels, handlers, the launcher's rank, rich. Ranks: tests/track/test_ranks.py."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

import fnaccel as fa
from fnaccel.errors import ArgumentError, MissingBackendError


def printed(code, **env):
    """The lines that Python code writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", f"import logging, fnaccel as fa\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=True,
    )
    return done.stderr.splitlines()


def ends(lines):
    return [line.partition(" ")[2].partition(" ")[2] for line in lines]  # without the time


@pytest.mark.long
def test_without_a_level_it_is_a_plain_logger():
    assert printed('log = fa.seeing.get_logger("a"); log.info("low"); log.warning("high")') == ["high"]


@pytest.mark.long
def test_a_level_adds_a_handler_where_there_is_none():
    lines = printed(
        'log = fa.seeing.get_logger("a", level="info"); log.info("low %d", 1); log.debug("lower")'
    )
    assert ends(lines) == ["INFO a: low 1"]


@pytest.mark.long
def test_a_handler_of_the_script_is_used():
    code = """
logging.basicConfig(format="mine %(message)s")
log = fa.seeing.get_logger("a", level="info"); log.info("low")
"""
    assert printed(code) == ["mine low"]


@pytest.mark.long
def test_the_level_of_a_recipe_holds_for_loggers_that_were_made_before():
    code = """
log, own, other = fa.seeing.get_logger("a"), fa.seeing.get_logger("b", level="error"), fa.seeing.get_logger("c")
log.info("before")
fa.config.recipe(fa.config.Recipe(tracking=fa.config.TrackingRecipe(level="info")))
log.info("after"); own.info("no"); other.debug("no")
"""
    assert ends(printed(code)) == ["INFO a: after"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "lines"), [("0", ["[rank 0] main", "[rank 0] all"]), ("1", ["[rank 1] all"])]
)
def test_before_a_start_the_rank_is_that_of_the_launcher(rank, lines):
    code = 'log = fa.seeing.get_logger("a"); log.warning("main"); log.warning("all", all_ranks=True)'
    assert printed(code, RANK=rank, WORLD_SIZE="2") == lines


@pytest.mark.long
def test_in_order_needs_a_world_if_there_are_several_ranks():
    assert printed('fa.seeing.get_logger("a").warning("alone", in_order=True)') == ["alone"]
    code = """
try: fa.seeing.get_logger("a").warning("x", in_order=True)
except fa.errors.NoWorldError: fa.seeing.get_logger("a").warning("none")
"""
    assert printed(code, RANK="0", WORLD_SIZE="2") == ["[rank 0] none"]


@pytest.mark.long
def test_colours_and_tracebacks_of_rich():
    code = """
log = fa.seeing.get_logger("a", level="info", rich=True)
fa.seeing.get_logger("b", level="info", rich=True).info("once")
try: raise ValueError("mine")
except ValueError: log.exception("failed")
"""
    lines = printed(code, FORCE_COLOR="1", COLUMNS="100")
    assert sum("once" in line for line in lines) == 1
    assert any("\x1b[" in line for line in lines)
    assert any("╭" in line for line in lines), "a box around the traceback"
    assert any("mine" in line for line in lines)


def test_mistakes(monkeypatch):
    with pytest.raises(ArgumentError, match="level='lod' is no level"):
        fa.seeing.get_logger("a", level="lod")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingBackendError, match=r"pip install .*\[rich\]"):
        fa.seeing.get_logger("a", rich=True)


def test_it_is_a_logger_of_python(caplog):
    logger = fa.seeing.get_logger("tests.seeing")
    with caplog.at_level(logging.INFO, logger="tests.seeing"):
        logger.info("x=%d", 1, extra={"step": 7})
    [record] = caplog.records
    assert (record.name, record.getMessage(), record.step) == ("tests.seeing", "x=1", 7)
    assert record.funcName == "test_it_is_a_logger_of_python"
    assert logger.logger is logging.getLogger("tests.seeing")
