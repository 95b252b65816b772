"""`fnaccel inspect`: what a checkpoint holds, its damage, and names that would move the cursor."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.cli.terminal import printable
from tests.checkpoint.training import make, train
from tests.interchange.test_adopt import net_state


@pytest.fixture
def root(tmp_path):
    with fa.start(device="cpu"):
        step = make("local()")
        state = step.init(seed=3)
        for number in range(2):
            state = train(step, state, number, 1)
            fa.save(tmp_path / "own", state, metadata={"note": "mine"})
    return tmp_path / "own"


def inspect(*arguments):
    return main(["inspect", *map(str, arguments)])


def test_a_table(root, capsys):
    assert inspect(root) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == f"fnaccel checkpoint {root / 'step-0000000002'}"
    assert "steps      1, 2" in lines
    assert "step       2" in lines
    assert "updates    2" in lines
    assert "seed       3" in lines
    assert 'metadata   {"note": "mine"}' in lines
    assert any(line.startswith("written by fnaccel ") for line in lines)
    row = next(line for line in lines if line.startswith("params/first.weight "))
    assert row.split() == ["params/first.weight", "float32", "[5,", "7]", "140", "B", "whole"]
    assert any(line.startswith("opt: 24 tensors, ") for line in lines)
    assert inspect(root, "--step", 1) == 0
    assert "step-0000000001" in capsys.readouterr().out
    assert inspect(root, "--step", 7) == 2
    assert "of step 7" in capsys.readouterr().err


def test_json(root, capsys):
    assert inspect(root, "--json", "--verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [1, 2]
    assert found["host"]["seed"] == 3
    assert found["damaged"] == []
    assert found["totals"]["params"]["tensors"] == 12
    shapes = {one["path"]: one["shape"] for one in found["tensors"]}
    assert shapes["params/first.weight"] == [5, 7]


def pieces(directory):
    step = make("fsdp()")
    fa.save(directory, step.init())


def test_damage_is_named_file_by_file(pools, tmp_path, capsys):
    pools.run(3, pieces, tmp_path)
    assert inspect(tmp_path, "--verify") == 0
    said = capsys.readouterr().out
    assert "3 pieces in 3 files" in said
    assert "verified: 3 files are what was written" in said
    files = sorted(fa.checkpoint.latest(tmp_path).glob("*.safetensors"))
    data = files[0].read_bytes()
    files[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert inspect(tmp_path) == 1  # the size needs no reading
    assert capsys.readouterr().err.count("damaged: ") == 1
    files[2].unlink()
    assert inspect(tmp_path, "--verify") == 1
    lines = capsys.readouterr().err.splitlines()
    assert [
        line.startswith("damaged: ") and file.name in line for line, file in zip(lines, files, strict=True)
    ]
    assert "not those that were written" in lines[0]
    assert "was written with" in lines[1]
    assert "is missing" in lines[2]


def test_safetensors(tmp_path, capsys):
    save_file(net_state(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert inspect(path) == 0
        said = capsys.readouterr().out
        assert "first.weight" in said
        assert "1 file" in said
    assert inspect(tmp_path, "--verify") == 2
    assert "no checksums" in capsys.readouterr().err
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert inspect(tmp_path / "a.pt") == 2
    assert "fnaccel convert" in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    name = "a\x1b[2J\x07\r\u202eb"
    with fa.start(device="cpu"):
        path = fa.save(tmp_path / "own", {"params": {name: torch.ones(2)}}, metadata={name: name})
    for options in ((), ("--json",), ("--verify",)):
        assert inspect(tmp_path / "own", *options) == 0
        said = capsys.readouterr().out
        assert all(one == "\n" or one.isprintable() for one in said), options
    file = path / "manifest.json"
    text = json.loads(file.read_text())
    del text["crc32"]
    text["tensors"][f"params/{name}"]["dtype"] = "\x1b[31m"
    file.write_text(json.dumps(text))
    assert inspect(tmp_path / "own") == 2
    said = capsys.readouterr().err
    assert "gives params/a\\x1b[2J" in said
    assert all(one == "\n" or one.isprintable() for one in said)


def test_printable():
    assert printable("tab\tü \ud800") == "tab\\tü \\ud800"
    assert printable("a\nb", keep="\n") == "a\nb"


@pytest.mark.long
def test_a_reader_that_has_seen_enough(tmp_path):
    import subprocess
    import sys

    with fa.start(device="cpu"):
        fa.save(tmp_path, {f"tensor{i}": torch.ones(1) for i in range(5_000)})
    command = f"{sys.executable} -m fnaccel inspect {tmp_path} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("fnaccel checkpoint")
    assert done.stderr == ""


@pytest.mark.parametrize("head", [b"", b'{"format": "fnaccel-checkpoint"'])
def test_a_sparse_manifest_is_not_read_into_memory(tmp_path, capsys, head):
    path = tmp_path / "step-0000000001" / "manifest.json"
    path.parent.mkdir()
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert inspect(tmp_path) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_a_folder_of_checkpoints_names_them(root, capsys):
    (root.parent / "empty").mkdir()
    (root / "step-0000000002").rename(root.parent / "step-0000000002")
    assert inspect(root.parent) == 0  # it is a root of some
    (root.parent / "step-0000000002").rename(root / "step-0000000002")
    capsys.readouterr()
    assert inspect(root.parent) == 2
    said = capsys.readouterr().err
    assert said.endswith(f"fix: give {root}\n")
    assert "found: empty, own" in said
