"""Mistakes on the command line, as a shell sees them: three lines and 2, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fnaccel as fa
from fnaccel.cli.main import main

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")


def fnaccel(*arguments, module="fnaccel", **options):
    settings = {"capture_output": True} | options
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, text=True, env=environment, timeout=120, check=False, **settings)


def refused(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2, arguments
    said = capsys.readouterr().err
    assert "\n  where: " in said
    assert "\n  fix: " in said
    return said


@pytest.fixture
def file(tmp_path):
    save_file({"a": torch.ones(2), "f.b": torch.ones(3)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_paths_that_are_no_checkpoint(capsys, tmp_path):
    for command in ("inspect", "convert"):
        target = [tmp_path / "x"] if command == "convert" else []
        assert "is neither a file nor a directory" in refused(capsys, command, "/dev/null", *target)
        assert "File name too long" in refused(capsys, command, "n" * 300, *target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["inspect", "launch"])
def test_a_directory_that_can_t_be_read(capsys, monkeypatch, tmp_path, command):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    if command == "launch":
        monkeypatch.setattr("fnaccel.cli.launch.launch", refuse)
    said = refused(capsys, command, tmp_path)
    assert said.startswith(f"PermissionError: Permission denied ({tmp_path})\n  where: fnaccel {command}\n")


def test_replacements_and_sizes(capsys, file, tmp_path):
    target = tmp_path / "x"
    for rule in (r"^a=\9", r"^f=\g<none>"):
        assert "rename= puts " in refused(capsys, "convert", file, target, "--rename", rule, "--to", "hf")
    options = ("--to", "hf", "--max-shard-size", "9" * 400)
    assert "is no number of bytes" in refused(capsys, "convert", file, target, *options)
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=str)
def test_a_file_goes_where_a_file_may_be(capsys, file, tmp_path, overwrite):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, words in {"fifo": "neither a file nor", "folder": "is a directory, and a file"}.items():
        assert words in refused(capsys, "convert", file, tmp_path / name, "--to", "safetensors", *overwrite)
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code = main(["convert", str(file), str(tmp_path / "link"), "--to", "safetensors", *overwrite])
    assert code == (0 if overwrite else 2)
    assert (tmp_path / "link").is_symlink()
    if overwrite:
        assert load_file(tmp_path / "real").keys() == {"a", "f.b"}


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_an_index_that_lists_what_is_nowhere(capsys, tmp_path, command):
    source = tmp_path / "in"
    source.mkdir()
    save_file({"a": torch.ones(2)}, source / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    target = [tmp_path / "out"] if command == "convert" else []
    assert "b is in the index, and in none of its files" in refused(capsys, command, source, *target)


def test_a_step_that_is_not_this_checkpoint_s(capsys, tmp_path):
    with fa.start(device="cpu"):
        path = fa.save(tmp_path / "own", {"params": {"a": torch.ones(2)}}, step=3)
    for command in ("inspect", "convert"):
        target = [tmp_path / "out"] if command == "convert" else []
        said = refused(capsys, command, path, *target, "--step", 4)
        assert "is the checkpoint of step 3, and step 4 was asked for" in said
        assert main([*map(str, (command, path, *target)), "--step", "3"]) == 0


@pytest.mark.long
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here: a full disk is not tried")
def test_output_to_a_full_disk():
    with FULL.open("w") as full:
        for arguments in (["env"], ["--help"], ["inspect", "--help"]):
            found = fnaccel(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
            assert found.returncode == 2
            assert found.stderr.startswith("OSError: No space left on device\n  where: fnaccel ")
            assert len(found.stderr.splitlines()) == 3


@pytest.mark.long
def test_a_reader_that_goes_away():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        found = fnaccel("env", capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert found.returncode == 141
    assert found.stderr == ""


def test_the_module_of_the_command_runs_too():
    found = fnaccel("lanch", module="fnaccel.cli.main")
    assert found.returncode == 2
    assert "did you mean 'launch'?" in found.stderr
