"""The order of the long tier: it holds every row once, and begins with what guards the change. And how it is run."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.long_tier import record
from tests.long_tier.order import (
    CHUNK,
    ENVIRONMENT,
    GROUPS,
    START,
    UNKNOWN,
    Chunk,
    Row,
    in_order,
    next_chunk,
    seconds_of,
)
from tests.long_tier.run import Run, changed_files, row_of
from tests.mutants import test_mutants
from tests.mutants.test_mutants import MUTANTS

BUGS = "tests/mutants/test_mutants.py::test_the_suite_goes_red"
ROWS = [
    Row("tests/launch/test_kills.py::test_a_run[1]"),
    Row(f"{BUGS}[a clip is left out]", bug_in="fnaccel/engine/gradients.py"),
    Row("tests/program/test_pure.py::test_it"),
    Row(f"{BUGS}[a flag is ignored]", bug_in="fnaccel/launch/flags.py"),
    Row("tests/trackers/test_real_runs.py::test_a_run", target=".venv-trackers/.trackers"),
]
names = st.sampled_from(["a", "b", "c"])
rows = st.builds(
    lambda room, file, test, row, bug, other: Row(
        f"tests/{room}/test_{file}.py::test_{test}[{row}]",
        f"fnaccel/{room}/{bug}.py" if bug else None,
        ".venv-jax/.jax" if other else ".venv/.dev",
    ),
    names, names, names, st.integers(0, 20), names | st.none(), st.booleans(),
)  # fmt: skip


def ids(chunks):
    return [row.id for chunk in chunks for row in chunk.rows]


@given(
    st.lists(rows, unique_by=lambda row: row.id),
    st.sets(
        st.builds("fnaccel/{}/{}.py".format, names, names)
        | st.builds("tests/{}/test_{}.py".format, names, names)
    ),
    st.text(max_size=3),
    st.dictionaries(st.builds("tests/{}/test_{}.py::test_{}".format, names, names, names), st.floats(0, 200)),
)
def test_the_order_holds_every_row_once(rows, changed, seed, table):
    chunks = in_order(rows, changed, seed, table)
    assert sorted(ids(chunks)) == sorted(row.id for row in rows)
    assert [GROUPS.index(chunk.group) for chunk in chunks] == sorted(
        GROUPS.index(chunk.group) for chunk in chunks
    )
    for chunk in chunks:
        assert len({(row.file, row.target) for row in chunk.rows}) == 1, "one process runs it"
        assert len(chunk.rows) == 1 or chunk.seconds <= START + ENVIRONMENT + CHUNK
    assert chunks == in_order(rows, changed, seed, table)


def test_a_changed_file_puts_its_deliberate_bugs_first_and_then_the_rows_of_its_room():
    chunks = in_order(ROWS, {"fnaccel/launch/flags.py", "docs/design.md"}, "", {})
    assert ids(chunks)[:2] == [ROWS[3].id, ROWS[0].id]
    assert [chunk.group for chunk in chunks] == [GROUPS[0], GROUPS[1], GROUPS[2], GROUPS[2], GROUPS[2]]


def test_a_changed_test_comes_before_the_rest():
    assert ids(in_order(ROWS, {"tests/program/test_pure.py"}, "", {}))[0] == ROWS[2].id


def test_a_changed_page_brings_the_rows_that_name_it():
    page = Row("tests/docs/test_docs.py::test_the_code_of_a_page_runs[performance.md]")
    assert ids(in_order([*ROWS, page], {"docs/performance.md"}, "", {}))[0] == page.id


def test_other_pages_make_all_of_it_the_rest_and_another_commit_shuffles_it():
    orders = [in_order(ROWS, {"README.md"}, seed, {}) for seed in "abcdefgh"]
    assert {chunk.group for order in orders for chunk in order} == {GROUPS[2]}
    assert len({tuple(ids(order)) for order in orders}) > 1


def test_a_row_without_a_time_is_in_it():
    table = {"tests/launch/test_kills.py::test_other": 30.0, "tests/launch/test_kills.py::test_third": 10.0}
    assert seconds_of(ROWS, table)[ROWS[0]] == 20.0, "the median of its file"
    assert seconds_of(ROWS, table)[ROWS[2]] == UNKNOWN
    assert ROWS[2].id in ids(in_order(ROWS, set(), "", table))


def test_the_first_chunk_that_fits_starts():
    chunks = [
        Chunk(GROUPS[2], (row,), seconds) for row, seconds in zip(ROWS, (50.0, 20.0, 30.0), strict=False)
    ]
    assert next_chunk(chunks, 100.0) is chunks[0]
    assert next_chunk(chunks, 35.0) is chunks[1]
    assert next_chunk(chunks, 10.0) is None
    assert next_chunk([], 10.0) is None


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_what_changed(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # set by a hook of this repository
        monkeypatch.delenv(name)
    assert changed_files(tmp_path) == set(), "no repository"
    git(tmp_path, "init", "-q")
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(f"{name}\n" * 40)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    assert changed_files(tmp_path) == set(), "no history"
    (tmp_path / "a.py").write_text("other\n")
    git(tmp_path, "mv", "b.py", "moved.py")
    (tmp_path / "moved.py").write_text("b.py\n" * 39 + "import c\n")
    git(tmp_path, "commit", "-qam", "second")
    assert changed_files(tmp_path) == {"a.py"}
    (tmp_path / "c.py").write_text("not committed\n")
    (tmp_path / "new.py").write_text("not added\n")
    assert changed_files(tmp_path) == {"a.py", "c.py", "new.py"}
    monkeypatch.setenv("PATH", "")
    assert changed_files(tmp_path) == set(), "no git"


def test_a_deliberate_bug_names_the_file_that_it_changes(request):
    class Item:
        nodeid, callspec = f"{BUGS}[a]", SimpleNamespace(params={"mutant": MUTANTS[0]})

        @staticmethod
        def get_closest_marker(name):
            return None

    assert row_of(Item).bug_in == f"fnaccel/{MUTANTS[0].file}"
    assert "mutant" in inspect.signature(test_mutants.test_the_suite_goes_red).parameters
    assert row_of(request.node).bug_in is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with two files of tests, and the make target of their environment."""
    (tmp_path / "Makefile").write_text("env:\n\t@touch made\n")
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_fails_once(n): assert n == 1\n"
        "def test_skips(): pytest.skip('why')\n"
    )
    (tmp_path / "test_b.py").write_text("import time\ndef test_sleeps(): time.sleep(100)\n")
    (tmp_path / "test_c.py").write_text(
        "import os, pytest, time\n"
        "def test_passes(): pass\n"
        "@pytest.mark.parametrize('code', [0, 1])\n"
        "def test_leaves(code): os._exit(code)\n"
        "@pytest.fixture\n"
        "def slow():\n"
        "    yield\n"
        "    time.sleep(100)\n"
        "def test_fails(slow): assert False\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(record.__file__).rpartition("/tests/")[0])
    return tmp_path


def rows_of(*names):
    return [Row(name, target="env", python=sys.executable) for name in names]


def test_chunks_run_and_their_rows_are_recorded(checkout, capsys):
    wanted = rows_of("test_a.py::test_passes", "test_a.py::test_fails_once[2]", "test_a.py::test_skips")
    run = Run(checkout, in_order(wanted, set(), "", {}))
    run.work()
    assert {result.id: result.outcome for result in run.results} == {
        "test_a.py::test_passes": "passed",
        "test_a.py::test_fails_once[2]": "failed",
        "test_a.py::test_skips": "skipped",
    }
    assert (checkout / "made").exists()
    assert run.broken == []
    said = capsys.readouterr().out
    assert "test_a.py: 1 passed, 1 failed, 1 skipped in" in said
    assert "assert 2 == 1" in said, "a failure is shown"
    assert run.code == 1


def test_why_a_row_is_skipped_is_shown(checkout, capsys):
    run = Run(checkout, in_order(rows_of("test_a.py::test_skips"), set(), "", {}))
    run.work()
    assert "SKIPPED [1] test_a.py:5: why" in capsys.readouterr().out
    assert run.code == 0


def test_a_row_that_is_gone_is_an_error(checkout, capsys):
    run = Run(checkout, in_order(rows_of("test_a.py::test_absent"), set(), "", {}))
    run.work()
    assert run.broken == ["test_a.py: pytest ended with 4, after 0 of 1 rows"]
    assert "not found" in capsys.readouterr().out
    assert run.code == 1


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_leaves_before_its_last_row_is_an_error(checkout, code):
    rows = rows_of("test_c.py::test_passes", f"test_c.py::test_leaves[{code}]")
    run = Run(checkout, [Chunk(GROUPS[2], tuple(rows), 1.0)])
    run.work()
    assert [result.outcome for result in run.results] == ["passed"]
    assert run.broken == [f"test_c.py: pytest ended with {code}, after 1 of 2 rows"]
    assert run.code == 1


@pytest.mark.long  # it waits for ten seconds
def test_a_row_that_failed_counts_if_its_teardown_is_cut(checkout, capsys, monkeypatch):
    monkeypatch.setattr("tests.long_tier.run.OVERRUN", 8.0)
    run = Run(checkout, [Chunk(GROUPS[2], tuple(rows_of("test_c.py::test_fails")), 0.0)], time.time() + 1)
    run.work()
    assert [result.outcome for result in run.results] == ["failed"]
    assert run.code == 1
    assert "assert False" in capsys.readouterr().out


def test_an_environment_that_can_not_be_made_is_an_error_and_other_rows_run(checkout, capsys):
    row = Row("test_a.py::test_passes", target="absent", python=sys.executable)
    chunks = [Chunk(GROUPS[2], (each,), 1.0) for each in (row, row, *rows_of("test_c.py::test_passes"))]
    run = Run(checkout, chunks)
    run.work()
    assert [result.id for result in run.results] == ["test_c.py::test_passes"]
    assert run.broken == ["make absent ended with 2"]
    assert "No rule to make target" in capsys.readouterr().out


@pytest.mark.long
def test_an_environment_that_is_not_made_in_time_is_no_failure(checkout, monkeypatch):
    monkeypatch.setattr("tests.long_tier.run.OVERRUN", 1.0)
    monkeypatch.setattr("tests.long_tier.run.PATIENCE", 0.1)
    (checkout / "Makefile").write_text("env:\n\tsleep 100\n")
    run = Run(checkout, [Chunk(GROUPS[2], tuple(rows_of("test_a.py::test_passes")), 0.0)], time.time() + 1)
    run.work()
    assert (run.results, run.broken, run.code) == ([], [], 0)


def test_after_the_deadline_nothing_starts(checkout):
    chunks = in_order(rows_of("test_a.py::test_passes"), set(), "", {})
    run = Run(checkout, list(chunks), time.time() + START)
    run.work()
    assert (run.waiting, run.results) == (chunks, [])


@pytest.mark.long
def test_a_chunk_that_takes_too_long_is_ended_and_is_no_failure(checkout, capsys, monkeypatch):
    monkeypatch.setattr("tests.long_tier.run.OVERRUN", 3.0)
    chunk = Chunk(GROUPS[2], tuple(rows_of("test_b.py::test_sleeps")), 0.0)
    run = Run(checkout, [chunk], time.time() + 1)
    run.work()
    assert (run.results, run.broken) == ([], [])
    assert "1 did not end" in capsys.readouterr().out
