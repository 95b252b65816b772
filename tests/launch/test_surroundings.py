"""A launch from a daemon, from a folder that is gone, and under limits: it runs, or says by name what is missing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import LIMIT, buffered

pytestmark = pytest.mark.long

SCRIPT = """\
import sys
import fnaccel as fa
with fa.start(device="cpu") as world:
    print("to standard output", flush=True)
    print("to standard error", file=sys.stderr, flush=True)
    sys.stdin.read()
    world.barrier()
    open(f"came{world.rank}", "w").close()
"""


def launch(folder, options="", *, before="", after=""):
    """Run a launch of two ranks by a shell."""
    (folder / "train.py").write_text(SCRIPT)
    command = f"{shlex.quote(sys.executable)} -m fnaccel launch -n 2 {options} {folder / 'train.py'}"
    environ = {**buffered(), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        ["sh", "-c", f"{before} {command} {after}"],
        cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip


@pytest.mark.launcher
@pytest.mark.parametrize("closed", [">&-", "<&-", "<&- >&- 2>&-", "2>&-"])
def test_closed_streams_are_the_null_device(tmp_path, closed):
    ended = launch(tmp_path, "--tee logs", after=closed)
    assert (ended.returncode, ended.stderr.replace("to standard error\n", "")) == (0, "")
    assert all((tmp_path / f"came{rank}").exists() for rank in (0, 1))
    for rank in (0, 1):  # the log of a rank has what the null device swallows
        log = (tmp_path / f"logs/rank{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["to standard error", "to standard output"]


@pytest.mark.launcher
def test_a_folder_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    ended = launch(tmp_path, before=f"mkdir {gone} && cd {gone} && rmdir {gone} &&")
    assert ended.returncode == 2
    assert ended.stderr == (
        "ArgumentError: the working folder does not exist any more\n"
        "  where: fnaccel launch\n"
        "  fix: change to a folder that exists: cd /path/to/project\n"
    )


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("limit", "code", "said"),
    [
        (40, 1, ["WorldError: rank 0 needs 38 more open files"]),  # rank 1 needs fewer: it keeps no store
        # torch would wait, and the launcher prints the rank that failed first
        (
            20,
            1,
            ["WorldError: rank 0 needs 38 more open files", "WorldError: rank 1 needs 23 more open files"],
        ),
        # as the interpreter opens a file, or as the first rank starts: by how many files the shell has open
        (10, 2, ["Too many open files\n  where: fnaccel launch\n"]),
    ],
)
def test_too_few_open_files_are_named(tmp_path, limit, code, said):
    ended = launch(tmp_path, before=f"ulimit -n {limit} &&")
    assert ended.returncode == code, ended.stderr
    assert any(text in ended.stderr for text in said), ended.stderr
    assert "ulimit -n" in ended.stderr
    assert ended.stderr.count("Traceback") == (code == 1)  # that of the script
