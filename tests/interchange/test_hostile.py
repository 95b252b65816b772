"""`adopt` of files that are damaged, hostile, or no checkpoint at all: errors, and nothing runs or changes."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

import fnaccel as fa
from fnaccel.errors import CheckpointError, UnknownNameError
from tests.checkpoint.training import make, train
from tests.interchange.test_adopt import net_state


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_not_run(world, tmp_path):
    state = make("local()").init()
    torch.save({"first.weight": torch.ones(2), "x": Bomb(tmp_path / "executed")}, tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    accelerate = tmp_path / "accelerate"
    accelerate.mkdir()
    save_file(net_state(), accelerate / "model.safetensors")
    torch.save({"state": Bomb(tmp_path / "executed"), "param_groups": []}, accelerate / "optimizer.bin")
    for name in ("a.bin", "b.bin", "accelerate"):
        with pytest.raises(CheckpointError, match=r"could run any code|no whole file"):
            fa.adopt(tmp_path / name, like=state)
        with pytest.raises(CheckpointError):
            fa.adopt(tmp_path / name, like=state, trust_pickle=True)
    assert not (tmp_path / "executed").exists()
    train_again = make("local()")
    train(train_again, train_again.init(), 0, 1)


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_damaged_files(world, tmp_path):
    state = make("local()").init()
    save_file(net_state(), tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    torch.save(net_state(), tmp_path / "whole.pt")
    binary = (tmp_path / "whole.pt").read_bytes()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases = {
        "cut.safetensors": content[:-10],
        "empty.safetensors": b"",
        "short.safetensors": b"\x01",
        "long.safetensors": struct.pack("<Q", 1 << 60) + b"{}",
        "odd.safetensors": header({"a": entry | {"dtype": "F4"}}, b"\0" * 8),
        "far.safetensors": header({"a": entry | {"data_offsets": [0, 80]}}, b"\0" * 8),
        "cut.pt": binary[: len(binary) // 2],
        "empty.pt": b"",
        "text.pt": b"hello there, this is no pickle",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError):
            fa.adopt(tmp_path / name, like=state)
    assert state.step == 0


def test_hostile_indices(world, tmp_path):
    state = make("local()").init()
    save_file(net_state(), tmp_path / "outside.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        for text, words in {
            '{"weight_map": {"a": "../outside.safetensors"}}': "can't be one of its own",
            '{"weight_map": {"a": 3}}': "can't be one of its own",
            '{"weight_map": {"a": "lost.safetensors"}}': "is missing",
            '{"weight_map": 3}': "no weight_map",
            "{": "no weight_map",
            "[" * 100_000: "no weight_map",
        }.items():
            (inner / name).write_text(text)
            with pytest.raises(CheckpointError, match=words):
                fa.adopt(inner, like=state)
        (inner / name).unlink()


def test_what_is_no_checkpoint(world, tmp_path):
    state = make("local()").init()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"known format \(accelerate, dcp.*found: notes.txt"):
        fa.adopt(tmp_path, like=state)
    with pytest.raises(CheckpointError, match="no checkpoint of a known format"):
        fa.adopt(tmp_path / "notes.txt", like=state)
    for form in (None, "torch"):
        with pytest.raises(CheckpointError, match="there is nothing at"):
            fa.adopt(tmp_path / "lost", like=state, format=form)
    with pytest.raises(UnknownNameError, match="safetensor'"):
        fa.adopt(tmp_path, like=state, format="safetensor")
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        fa.adopt(tmp_path / "a.pt", like=state)
    torch.save({"a": torch.ones(2), "b": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"b in a\.pt is a int"):
        fa.adopt(tmp_path / "a.pt", like=state)
    for name in "ab":
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="and in another file"):
        fa.adopt(tmp_path, like=state, format="safetensors")
