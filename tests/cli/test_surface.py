"""The command line that users rely on: every option of every command, `--json`, `--help`, completion."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fnaccel.cli.completion import parsers
from fnaccel.cli.main import main
from fnaccel.cli.options import COMMANDS

SURFACE = Path(__file__).with_name("surface.txt")


def surface():
    """A line for each option and argument of each command: its names, its kind, its default."""
    lines = []
    for words, parser in parsers().items():
        for action in parser._actions:
            names = "/".join(action.option_strings) or action.dest
            kind = type(action).__name__.strip("_").removesuffix("Action").lower()
            value = getattr(action.type, "__name__", "") or ("" if kind != "store" else "str")
            choices = f" of {','.join(map(str, action.choices))}" if action.choices else ""
            lines.append(f"{words}: {names} {kind} {value}{choices} = {action.default!r}".replace("  ", " "))
    return lines


def test_the_surface_is_frozen():
    # a line that goes or changes breaks somebody's scripts: say so in the changelog, then
    # python -c "from tests.cli.test_surface import *; SURFACE.write_text('\n'.join(surface()) + '\n')"
    assert surface() == SURFACE.read_text().splitlines()


def test_every_command_prints_json():
    without = [words for words, parser in parsers().items() if "--json" not in parser.format_help()]
    actions = importlib.import_module("fnaccel.cli.options.config").ACTIONS
    assert without == ["config"]  # its actions have it
    assert actions


def test_help_imports_no_torch():
    code = "import sys\nfrom fnaccel.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    code += "assert 'torch' not in sys.modules, 'torch'"
    for words in [[], *([command] for command in COMMANDS)]:
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage: fnaccel" in done.stdout


@pytest.mark.parametrize("words", sorted(parsers()))
def test_help_shows_the_options_of_its_command(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help"])
    assert ended.value.code == 0
    assert parsers()[words].format_help() == capsys.readouterr().out


@pytest.mark.long
def test_a_script_has_a_help_of_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('arguments', sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, "-m", "fnaccel", "launch", "-n", "1", "--cpu", str(script), "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "arguments ['--help']\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_all_commands(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "strategies" in script


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["fnaccel", "ins"], {"inspect"}),
        (["fnaccel", "plan", "--stra"], {"--strategy"}),
        (["fnaccel", "config", "val"], {"validate"}),
        (["fnaccel", "config", "show", "--pre"], {"--precision"}),
    ],
)
def test_completion_in_bash(words, completed, capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    line = f"source completion.bash; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
    line += "$(complete -p fnaccel | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert set(done.stdout.split()) == completed


def test_env_as_json(capsys):
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fnaccel"]


def test_a_plan_as_json(capsys):
    words = [
        "tests.tiny_models:loss_fn",
        "--model",
        "tests.tiny_models:Net",
        "-n",
        "2",
        "--strategy",
        "fsdp",
        "--json",
    ]
    assert main(["plan", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["layout"].startswith("fsdp()")
    assert found["footprint"]["parameters"] > 0


def test_a_dry_run_as_json(capsys, tmp_path):
    (tmp_path / "t.py").write_text("")
    assert main(["launch", "-n", "2", "--cpu", "--dry-run", "--json", str(tmp_path / "t.py")]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert [command["env"]["RANK"] for command in commands] == ["0", "1"]
    assert main(["launch", "--cpu", "--json", str(tmp_path / "t.py")]) == 2
    assert "--json without --dry-run" in capsys.readouterr().err
