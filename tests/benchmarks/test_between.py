"""Two checkouts are compared row by row: by the medians of their rounds, each with its own fnaccel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import between
import pytest

from tests.docs.names import ROOT

STEADY, NOISY = [1.0, 1.0, 1.0], [0.9, 1.0, 1.1]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        pytest.param(STEADY, [1.03, 1.03, 1.03], "slower", id="3 % more"),
        pytest.param(STEADY, [1.02, 1.02, 1.02], "same", id="2 % more"),
        pytest.param(STEADY, [0.98, 0.98, 0.98], "same", id="2 % less"),
        pytest.param(STEADY, [0.97, 0.97, 0.97], "faster", id="3 % less"),
        pytest.param(NOISY, [1.09, 1.09, 1.09], "same", id="more, within half of the old range"),
        pytest.param(NOISY, [1.11, 1.11, 1.11], "slower", id="more than half of the old range"),
        pytest.param(NOISY, [0.91, 0.91, 0.91], "same", id="less, within half of the old range"),
        pytest.param(NOISY, [0.89, 0.89, 0.89], "faster", id="less by more than half of the old range"),
        pytest.param(STEADY, [1.0, 1.0, 9.0], "same", id="one bad round"),
        pytest.param([0.1], [0.103], "slower", id="2 % are of the old ratio"),
        pytest.param(STEADY, [0.5, 1.03, 1.5], "slower", id="the new range does not count"),
    ],
)
def test_a_verdict(old, new, word):
    assert between.verdict(old, new) == word


def test_checkouts_take_turns_to_begin():
    assert [between.order(number)[0] for number in range(4)] == ["OLD", "NEW", "OLD", "NEW"]
    assert all(set(between.order(number)) == {"OLD", "NEW"} for number in range(2))


def test_ratios_are_those_by_hand():
    rows = [
        {"what": "a step", "against": "PyTorch by hand", "ratio": 0.5},
        {"what": "a step", "against": "PyTorch by hand, fused AdamW", "ratio": 0.7},
        {"what": "a batch", "against": "plain DataLoader", "ratio": 0.9},
        {"what": "a launch", "against": "torchrun", "ratio": 1.1},
    ]
    assert between.by_hand(rows) == {"a step": [0.5], "a batch": [0.9], "a launch": []}


def test_every_row_of_step_overhead_has_one_contestant_by_hand():
    rows = json.loads((ROOT / "benchmarks" / "results" / "step_overhead.json").read_text())["rows"]
    assert {len(ratios) for ratios in between.by_hand(rows).values()} == {1}


def test_a_table():
    old = {"gone": [1.0], "a step": [1.0, 1.1], "a batch": [0.5], "a launch": []}
    new = {"a step": [1.2, 1.2], "a batch": [0.5], "a launch": [], "added": [1.0]}
    assert between.table(old, new).splitlines() == [
        "row        OLD    NEW  NEW / OLD  range of OLD  verdict",
        "a step   1.050  1.200      1.143         0.100  slower",
        "a batch  0.500  0.500      1.000         0.000  same",
        "not compared, only in OLD: gone",
        "not compared, no contestant by hand: a launch",
        "not compared, only in NEW: added",
        "2 rows, 1 slower",
    ]


# -- the command ------------------------------------------------------------------------------------------------

FAKE = """
import json, os, sys
from pathlib import Path
import fnaccel
here = Path(__file__).resolve().parents[1]
with open(here.parent / "runs", "a") as file:
    print(here.name, os.environ["OMP_NUM_THREADS"], *sys.argv[1:-1], file=file)
row = {"what": "a step", "against": "PyTorch by hand", "ratio": fnaccel.RATIO}
Path(sys.argv[-1]).write_text(json.dumps({"rows": [row]}))
"""


def fake_checkout(folder, *, ratio=0.5, script=FAKE):
    """A checkout whose benchmark writes the ratio that its own `fnaccel` holds."""
    for name, file, text in (
        ("fnaccel", "__init__.py", f"RATIO = {ratio}\n"),
        ("benchmarks", "step_overhead.py", script),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(text)


def compared(tmp_path, *flags):
    command = [sys.executable, str(ROOT / "benchmarks" / "between.py"), "old", "new", "--rounds", "2", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("ratio", "status", "end"),
    [
        pytest.param(0.6, 1, "1 rows, 1 slower", id="slower"),
        pytest.param(0.5, 0, "1 rows, 0 slower", id="same"),
    ],
)
def test_each_checkout_runs_with_its_own_fnaccel(tmp_path, ratio, status, end):
    fake_checkout(tmp_path / "old")
    fake_checkout(tmp_path / "new", ratio=ratio)
    done = compared(tmp_path, "--only", "step,data")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, end), done.stderr
    assert f"a step  0.500  {ratio:.3f}" in done.stdout
    runs = [f"{name} 1 --quick --only step,data --into" for name in ("old", "new", "new", "old")]
    assert (tmp_path / "runs").read_text().splitlines() == runs


def test_full_rounds(tmp_path):
    for name in ("old", "new"):
        fake_checkout(tmp_path / name)
    assert compared(tmp_path, "--full").returncode == 0
    assert (tmp_path / "runs").read_text().splitlines()[0] == "old 1 --into"


def test_another_fnaccel_stops_the_command(tmp_path):
    for name in ("old", "new"):
        fake_checkout(tmp_path / name)
    other = tmp_path / "new" / "benchmarks" / "fnaccel.py"
    other.write_text("RATIO = 0.5\n")
    done = compared(tmp_path)
    assert done.returncode == 2
    assert f"the benchmarks import {other}, not {tmp_path / 'new' / 'fnaccel'}" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_package_without_its_first_file_stops_the_command(tmp_path):
    for name in ("old", "new"):
        fake_checkout(tmp_path / name)
    # Python prefers a whole package in a later place, such as the one that is installed
    (tmp_path / "old" / "fnaccel" / "__init__.py").unlink()
    done = compared(tmp_path)
    assert done.returncode == 2
    assert f"not {tmp_path / 'old' / 'fnaccel'}\n  where: {tmp_path / 'old'}\n  fix: " in done.stderr


def test_a_round_that_fails(tmp_path):
    fake_checkout(tmp_path / "old")
    fake_checkout(tmp_path / "new", script="raise SystemExit('no such peer')")
    done = compared(tmp_path)
    script = tmp_path / "new" / "benchmarks" / "step_overhead.py"
    assert done.returncode == 2
    assert "no such peer" in done.stderr
    assert f"a round failed, see above\n  where: {script}\n  fix: " in done.stderr


def test_rows_without_a_counterpart_are_no_comparison(tmp_path):
    fake_checkout(tmp_path / "old")
    fake_checkout(tmp_path / "new", script=FAKE.replace("a step", "another step"))
    done = compared(tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "0 rows, 0 slower")
    assert "no row was compared\n  where: old and new\n  fix: " in done.stderr


def test_a_folder_that_is_no_checkout(tmp_path):
    fake_checkout(tmp_path / "old")
    (tmp_path / "new").mkdir()
    done = compared(tmp_path)
    assert done.returncode == 2
    assert f"where: {tmp_path / 'new'}\n  fix: name the root of a checkout" in done.stderr


# -- revisions --------------------------------------------------------------------------------------------------


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Run git in a repository of one commit, which stands for the present one."""
    root = tmp_path / "repository"
    fake_checkout(root)
    monkeypatch.setattr(between, "ROOT", root)

    def git(*words):
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(root), *author, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return git


def test_a_revision_has_a_worktree_for_a_while(git):
    with between.checkout("HEAD") as folder:
        assert (folder / "benchmarks" / "step_overhead.py").read_text() == FAKE
        assert len(git("worktree", "list").splitlines()) == 2
    assert not folder.exists()
    assert len(git("worktree", "list").splitlines()) == 1


def test_neither_a_folder_nor_a_revision(git, capsys):
    with pytest.raises(SystemExit), between.checkout("nowhere"):
        pass
    assert "'nowhere' is neither a folder nor a git revision" in capsys.readouterr().err
