"""`fnaccel`: commands, their errors, and `env`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import fnaccel
from fnaccel.cli.main import COMMANDS, main


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert all(f"  {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: fnaccel {command}" in capsys.readouterr().out


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fnaccel {fnaccel.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["lanch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "UnknownNameError: no command is called 'lanch'\n  where: fnaccel\n  fix: did you mean 'launch'?"
    )


def test_env_names_versions_devices_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("FNACCEL_DEVICE", "cpu")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert shown["fnaccel"] == fnaccel.__version__
    assert shown["torch"] == torch.__version__
    assert "cpu with" in shown["devices"]
    assert "gloo" in shown["backends"]
    assert shown["FNACCEL_DEVICE"] == "cpu"
    assert "hidden" not in said


def test_env_says_why_torch_is_not_there():
    code = (
        "import sys; sys.modules['torch'] = None; from fnaccel.cli.main import main; sys.exit(main(['env']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^torch +can't be imported: ", ended.stdout, re.MULTILINE)
    assert re.search(r"^python +3\.", ended.stdout, re.MULTILINE)
