"""Recipes with earlier names of keys."""

from __future__ import annotations

import pytest

from fnaccel.cli.main import main
from fnaccel.config import renaming
from fnaccel.config.renaming import renamed
from fnaccel.errors import ConfigError

TEXT = """# my run
stratgy: ddp   # two copies
launch:
  # of one machine
  procs: 2
"""
TABLE = {"stratgy": "strategy", "launch.procs": "ranks"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "r.yaml"
    path.write_text(TEXT)
    monkeypatch.setattr(renaming, "RENAMED", TABLE)
    return path


def test_comments_and_order_stay(file):
    before, after = renamed(file)
    assert before == TEXT
    assert after == TEXT.replace("stratgy", "strategy").replace("procs", "ranks")


def test_check_only_shows_and_update_writes(file, capsys):
    assert main(["config", "update", str(file), "--check"]) == 1
    assert "+  ranks: 2" in capsys.readouterr().out.splitlines()
    assert file.read_text() == TEXT
    assert main(["config", "update", str(file)]) == 0
    assert "ranks: 2" in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["r.yaml"]
    capsys.readouterr()
    assert main(["config", "update", str(file), "--check"]) == 0
    assert capsys.readouterr().out == f"{file} is up to date\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "compute_environment: LOCAL_MACHINE\nnum_processes: 2",
            "is a file of accelerate(.|\n)*config import",
        ),
        ("zero_optimization: {stage: 2}", "is a file of deepspeed"),
        ("precison: bf16", "no key 'precison'(.|\n)*'precision'"),
        ("a: [", "this is not YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, says):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        renamed(tmp_path / "r.yaml")


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        renamed(tmp_path / "r.yaml")
