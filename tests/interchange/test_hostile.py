"""`adopt` of files that are damaged, hostile, or no checkpoint at all: errors, and nothing runs or changes."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import CheckpointError, UnknownNameError
from fnaccel.interchange import fitting
from tests.checkpoint.training import gathered, make, train, unequal
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
            fa.interchange.adopt(tmp_path / name, like=state)
        with pytest.raises(CheckpointError):
            fa.interchange.adopt(tmp_path / name, like=state, trust_pickle=True)
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
            fa.interchange.adopt(tmp_path / name, like=state)
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
                fa.interchange.adopt(inner, like=state)
        (inner / name).unlink()


def test_what_is_no_checkpoint(world, tmp_path):
    state = make("local()").init()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"known format \(accelerate, dcp.*found: notes.txt"):
        fa.interchange.adopt(tmp_path, like=state)
    with pytest.raises(CheckpointError, match="no checkpoint of a known format"):
        fa.interchange.adopt(tmp_path / "notes.txt", like=state)
    for form in (None, "torch"):
        with pytest.raises(CheckpointError, match="there is nothing at"):
            fa.interchange.adopt(tmp_path / "lost", like=state, format=form)
    with pytest.raises(UnknownNameError, match="safetensor'"):
        fa.interchange.adopt(tmp_path, like=state, format="safetensor")
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        fa.interchange.adopt(tmp_path / "a.pt", like=state)
    torch.save({"a": torch.ones(2), "b": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"b in a\.pt is a int"):
        fa.interchange.adopt(tmp_path / "a.pt", like=state)
    for name in "ab":
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="and in another file"):
        fa.interchange.adopt(tmp_path, like=state, format="safetensors")


def damage(directory, kind):
    """Damage that no name and no size shows."""
    if kind == "bits of fnaccel":
        [file] = directory.glob("*.safetensors")
        flip(file, -1)
    elif kind == "header of fnaccel":
        [file] = directory.glob("*.safetensors")
        file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    else:
        file = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])


def write_dcp(path):
    dcp.save({name: x.detach() for name, x in net_state().items()}, checkpoint_id=path, no_dist=True)


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


KINDS = ["bits of fnaccel", "header of fnaccel", "half of dcp"]


def adopts_damage(layout, path):
    step = make(layout)
    state = step.init(seed=3)
    before = gathered(state)
    with pytest.raises(CheckpointError, match=r"not those that were written|otherwise than|can't be read"):
        fa.interchange.adopt(path, like=state, trust_pickle=True)
    same = unequal(gathered(state), before) == []
    train(step, state, 0, 1)  # it is live
    return same


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", [("local()", 1), ("fsdp()", 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_values_leaves_the_state_live(pools, tmp_path, kind, layout):
    with fa.start(device="cpu"):
        path = tmp_path / "dcp"
        if "fnaccel" in kind:
            path = fa.save(tmp_path / "own", make("local()").init(seed=1))
        else:
            write_dcp(path)
        damage(path, kind)
    assert pools.run(layout[1], adopts_damage, layout[0], path) == [True] * layout[1]


def test_damage_is_not_converted(tmp_path):
    """A copy would get checksums of its own."""
    with fa.start(device="cpu"):
        path = fa.save(tmp_path / "own", {"params": {"w": torch.ones(100)}})
    damage(path, "bits of fnaccel")
    for to in ("hf", "fnaccel", "safetensors"):
        assert main(["convert", str(path), str(tmp_path / f"to-{to}"), "--to", to]) == 2
    with pytest.raises(CheckpointError, match="not those that were written"):
        fa.interchange.export_hf(tmp_path / "exported", path)
    assert [one.name for one in tmp_path.iterdir() if one.name != "to-fnaccel"] == ["own"]


def test_blocks_that_overlap(world, tmp_path):
    """Two shards of torch's Hugging Face writer that both hold the first half, and neither the second."""
    for number in (1, 2):
        place = {"w": {"saved_offsets": [0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(place)}
        save_file({"w": torch.ones(2)}, tmp_path / f"shard-{number}.safetensors", metadata)
    save_file(
        {"w": torch.ones(2)},
        tmp_path / "shard-3.safetensors",
        {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4]}})},
    )
    with pytest.raises(CheckpointError, match="do not make up"):
        fa.interchange.adopt(tmp_path, like={"w": torch.zeros(6)}, format="safetensors")


def test_a_source_that_is_replaced_while_it_is_read(world, tmp_path, monkeypatch):
    """An export over an earlier one renames the directory: what was opened and what is read must not mix."""
    target = tmp_path / "exported"
    state = make("local()").init(seed=1)
    fa.interchange.export_hf(target, state)
    real, calls = fitting.fit, []

    def fit(*args):
        if not calls:
            calls.append(True)
            fa.interchange.export_hf(target, state, overwrite=True)
        return real(*args)

    monkeypatch.setattr("fnaccel.interchange.adopting.fit", fit)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        fa.interchange.adopt(target, like=state)
    fa.interchange.adopt(target, like=state)


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_counts_that_are_none(world, tmp_path, count):
    moments = {0: {"step": torch.tensor(count), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    optimizer = {"state": moments, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"weight": torch.zeros(3)}, "optimizer": optimizer}, tmp_path / "a.pt")
    slots = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    state = {"params": {"weight": torch.ones(3)}, "opt": {"weight": slots}}
    with pytest.raises(CheckpointError, match="the optimizer counts"):
        fa.interchange.adopt(tmp_path / "a.pt", like=state)


def test_a_tensor_that_is_expanded(tmp_path, capsys):
    """A file of 1 kB whose one value is a tensor of 4 TB: it would be written until the disk is full."""
    wide, base = torch.zeros(1).expand(10**12), torch.zeros(250_000)
    optimizer = {"state": {0: {"exp_avg": wide}}, "param_groups": [{"params": [0]}]}
    for name, content in {
        "weights": {"w": wide, "b": torch.ones(2)},
        "names": {f"w{number}": base.view(500, 500) for number in range(200)},
        "moments": {"model": {"w": torch.zeros(1)}, "optimizer": optimizer},
    }.items():
        torch.save(content, tmp_path / f"{name}.pt")
        for to in ("hf", "fnaccel", "safetensors"):
            target = tmp_path / f"{name}-{to}"
            assert main(["convert", str(tmp_path / f"{name}.pt"), str(target), "--to", to]) == 2
            assert "clone()" in capsys.readouterr().err
            assert not target.exists()


def test_a_tensor_that_is_expanded_is_named(world, tmp_path):
    torch.save({"w": torch.zeros(1).expand(10**12), "b": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"4,000,000,000,008 bytes of values .*largest is w"):
        fa.interchange.adopt(tmp_path / "a.pt", like={"w": torch.zeros(1), "b": torch.ones(2)})


def test_weights_that_are_tied_or_expanded_a_little_are_read(world, tmp_path):
    base = torch.randn(50, 100)
    content = {"a": base, "b": base, "c": base[:1].expand(50, 100)}
    torch.save(content, tmp_path / "a.pt")
    found = fa.interchange.adopt(tmp_path / "a.pt", like={name: torch.zeros(50, 100) for name in content})
    assert all(torch.equal(found[name], content[name]) for name in content)
