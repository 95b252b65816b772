"""Checkpoints into models without values: formats, homes, dtypes, and errors that leave the model as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import fnaccel as fa
from tests.big.models import Net
from tests.big.movers import Devices, Simulated

TOKENS = torch.tensor([1, 2, 3])


def output(net):
    with torch.inference_mode():
        return net(TOKENS)["logits"]


def net(**options):
    torch.manual_seed(3)
    return Net(width=8, depth=2, **options).eval()


def empty(**options):
    with fa.big.empty():
        return Net(width=8, depth=2, **options).eval()


def sharded(folder, model, suffix="safetensors"):
    """Two shards and an index, as Hugging Face writes them."""
    folder.mkdir()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state.pop("head.weight") if model.head.weight is model.embed.weight else None
    names = list(state)
    files = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        safe = suffix == "safetensors"
        file = f"{'model' if safe else 'pytorch_model'}-{number:05}-of-00002.{suffix}"
        (save_file if safe else torch.save)({name: state[name] for name in part}, folder / file)
        files |= dict.fromkeys(part, file)
    index = "model.safetensors.index.json" if suffix == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture(params=["file", "torch", "sharded", "sharded torch", "fnaccel", "dcp"])
def checkpoint(request, tmp_path):
    """The weights of `net()` in each format."""
    if request.param == "file":
        save_model(net(), tmp_path / "net.safetensors")
        return tmp_path / "net.safetensors"
    if request.param == "torch":
        torch.save(net().state_dict(), tmp_path / "net.pt")
        return tmp_path / "net.pt"
    if request.param == "fnaccel":
        with fa.start():
            return fa.save(tmp_path / "own", net().state_dict())
    if request.param == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(net().state_dict(), checkpoint_id=tmp_path / "dcp")
        return tmp_path / "dcp"
    return sharded(tmp_path / "hf", net(), "bin" if "torch" in request.param else "safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    "placed",
    [
        {"": "cpu"},
        {"": "disk"},
        {"": 0},
        {"embed": 0, "head": 0, "mask": 0, "blocks.0": 1, "blocks.1": "disk", "norm": "cpu"},
    ],
    ids=["cpu", "disk", "device", "mixed"],
)
def test_every_format_to_every_home(checkpoint, placed, tmp_path):
    expected = output(net())
    model, mover = empty(), Simulated()
    run = fa.big.load(model, checkpoint, placed, folder=tmp_path / "offload", mover=mover, trust_pickle=True)
    with Devices():
        for _ in range(2):
            assert torch.equal(output(model), expected)
    assert not model.norm.running_mean.is_meta
    if checkpoint.suffix == ".safetensors" or checkpoint.name == "hf":
        assert not (tmp_path / "offload").exists()  # used where it lies
    run.remove()
    assert torch.equal(output(model), expected)
    assert model.head.weight is model.embed.weight


def test_dtypes(tmp_path):
    sharded(tmp_path / "hf", net().to(torch.float64))
    for dtype, expected in (
        (None, "float32"),
        ("bf16", "bfloat16"),
        (torch.float16, "float16"),
        ("stored", "float64"),
    ):
        for home in ("cpu", "disk"):
            model = empty()
            run = fa.big.load(model, tmp_path / "hf", home, dtype=dtype)
            with run.fetched():
                assert str(model.blocks[0].up.weight.dtype) == f"torch.{expected}"
                assert model.norm.num_batches_tracked.dtype is torch.int64
            run.remove()
            assert torch.equal(
                model.embed.weight.double(), net().embed.weight.to(model.embed.weight.dtype).double()
            )
    with pytest.raises(fa.errors.UnknownNameError, match="no floating-point dtype is called 'int8'"):
        fa.big.load(empty(), tmp_path / "hf", dtype="int8")


def test_a_strategy_in_the_place_of_a_map(tmp_path):
    sharded(tmp_path / "hf", net())
    model = empty()
    run = fa.big.load(model, tmp_path / "hf", "auto", budget={"cpu": 2000})
    assert run.map.devices == ("cpu", "disk")
    assert torch.equal(output(model), output(net()))


@pytest.mark.parametrize("name", [None, "weight_map.index.json", "model.index.fp16.json", "index.json"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_of_any_name(tmp_path, suffix, name):
    original = net()
    (index,) = sharded(tmp_path / "sharded", original, suffix).glob("*.index.json")
    index = index if name is None else index.rename(index.with_name(name))
    for path in (index, index.parent):
        model = empty()
        fa.big.load(model, path).remove()
        assert torch.equal(output(model), output(original))
    (index.parent / next(iter(json.loads(index.read_text())["weight_map"].values()))).unlink()
    for path in (index, index.parent) if suffix == "bin" else (index,):
        with pytest.raises(fa.errors.CheckpointError, match=r"is missing, and .* lists it"):
            fa.big.load(empty(), path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_index_that_is_given_counts(tmp_path, suffix):
    """A variant lies beside the usual files, as on the Hub."""
    first, second = net(), net()
    second.norm.weight.data.add_(1)
    folder = sharded(tmp_path / "sharded", first, suffix)
    other = sharded(tmp_path / "other", second, suffix)
    (index,) = other.glob("*.index.json")
    files = json.loads(index.read_text())["weight_map"]
    for file in set(files.values()):
        (other / file).rename(folder / f"fp16-{file}")
    variant = folder / index.name.replace(".index", ".index.fp16")
    variant.write_text(json.dumps({"weight_map": {key: f"fp16-{file}" for key, file in files.items()}}))
    for path, expected in ((folder, first), (variant, second)):
        model = empty()
        fa.big.load(model, path).remove()
        assert torch.equal(output(model), output(expected))


def test_an_index_of_unknown_files(tmp_path):
    index = tmp_path / "weight_map.index.json"
    for text in (
        "{",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "a.txt"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(text)
        with pytest.raises(fa.errors.CheckpointError, match="no checkpoint of a known format"):
            fa.big.load(empty(), index)


@pytest.mark.parametrize("placed", ["cpu", "disk"])
def test_a_file_that_torch_does_not_map(tmp_path, placed):
    """One of before torch 1.6 is read into memory. Pages of that can't be let go: they would be zeros."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))  # 64 pages each
    torch.save(original.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with fa.big.empty():
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    run = fa.big.load(model, tmp_path / "old.pt", placed, folder=tmp_path / "disk")
    x = torch.randn(2, 256)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), original(x))
    run.remove()
    assert torch.equal(model(x), original(x))


def test_prefixes_and_new_names(tmp_path):
    torch.save({f"module.{name}": value for name, value in net().state_dict().items()}, tmp_path / "net.pt")
    model = empty()
    fa.big.load(model, tmp_path / "net.pt")
    assert torch.equal(output(model), output(net()))
    torch.save(
        {name.replace("blocks", "h"): value for name, value in net().state_dict().items()}, tmp_path / "h.pt"
    )
    model = empty()
    fa.big.load(model, tmp_path / "h.pt", rename={r"/h\.": "/blocks."})
    assert torch.equal(output(model), output(net()))


def test_a_model_with_values_gets_new_ones(tmp_path):
    save_model(net(), tmp_path / "net.safetensors")
    model = Net(width=8, depth=2).eval()
    fa.big.load(model, tmp_path / "net.safetensors")
    assert torch.equal(output(model), output(net()))
    model.requires_grad_(False)
    model.embed.weight.zero_()  # a mapped file is not written to
    again = empty()
    fa.big.load(again, tmp_path / "net.safetensors", copy=True)
    assert torch.equal(output(again), output(net()))
    (tmp_path / "net.safetensors").write_bytes(b"")  # and a copy does not need it
    assert torch.equal(output(again), output(net()))


def without(name):
    return {key: value for key, value in net().state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        (
            {**without("norm.weight"), "extra": torch.ones(1)},
            ["params/norm.weight: only in the model", "params/extra: only in the source"],
        ),
        (
            {**net().state_dict(), "norm.bias": torch.ones(3)},
            ["params/norm.bias: float32 [3] in the source, float32 [8] in the model"],
        ),
        (
            {**net().state_dict(), "norm.bias": torch.ones(8, dtype=torch.int64)},
            ["params/norm.bias: int64 [8]"],
        ),
        ({**net().state_dict(), "head.weight": torch.ones(11, 8)}, ["tied in the model, and has two values"]),
    ],
    ids=["missing and unexpected", "shape", "kind of dtype", "tied"],
)
def test_all_paths_that_differ_are_in_one_error(tmp_path, state, messages):
    torch.save(state, tmp_path / "net.pt")
    model = empty()
    with pytest.raises(fa.errors.TreeMismatchError) as error:
        fa.big.load(model, tmp_path / "net.pt")
    assert all(message in str(error.value) for message in messages)
    assert all(p.is_meta for p in model.parameters())


def test_buffers_without_values(tmp_path):
    save_model(net(), tmp_path / "net.safetensors")
    with fa.big.empty(buffers=True):
        model = Net(width=8, depth=2)
    with pytest.raises(fa.errors.TreeMismatchError, match="1 tensors would have no values: mask"):
        fa.big.load(model, tmp_path / "net.safetensors")
    model.mask = torch.ones(8)
    fa.big.load(model.eval(), tmp_path / "net.safetensors")
    assert torch.equal(output(model), output(net()))


def truncated(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-50])


def wrong_index(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["nowhere"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))


def missing(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "model-00001-of-00002.safetensors is no whole safetensors file"),
        (wrong_index, "nowhere is in the index, and in none of its files"),
        (missing, "model-00002-of-00002.safetensors is missing"),
    ],
)
def test_damage_is_found_before_anything_is_changed(tmp_path, damage, message):
    damage(sharded(tmp_path / "hf", net()))
    model = empty()
    with pytest.raises(fa.errors.CheckpointError, match=message):
        fa.big.load(model, tmp_path / "hf", "disk")
    assert all(p.is_meta for p in model.parameters())
    assert fa.big.dispatch_of(model) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_disk_without_space(tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp

    dcp.save(net().state_dict(), checkpoint_id=tmp_path / "dcp")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    model = empty()
    with pytest.raises(fa.errors.ArgumentError, match="which has 10 B left"):
        fa.big.load(model, tmp_path / "dcp", "disk", folder=tmp_path / "offload", trust_pickle=True)
    with pytest.raises(fa.errors.ArgumentError, match="there is no folder for them"):
        fa.big.load(model, tmp_path / "dcp", "disk", trust_pickle=True)
    assert all(p.is_meta for p in model.parameters())


def test_other_mistakes(tmp_path):
    save_model(net(), tmp_path / "net.safetensors")
    with pytest.raises(fa.errors.CheckpointError, match="there is nothing at"):
        fa.big.load(empty(), tmp_path / "nowhere")
    with pytest.raises(fa.errors.CapabilityError, match="this machine has no accelerators"):
        fa.big.load(empty(), tmp_path / "net.safetensors", 0)
    with pytest.raises(fa.errors.ArgumentError, match="no device of the budget can run it"):
        fa.big.load(empty(), tmp_path / "net.safetensors", "auto", budget={"cpu": 10})
    with pytest.raises(fa.errors.ArgumentError, match="readers=0"):
        fa.big.load(empty(), tmp_path / "net.safetensors", readers=0)
    with pytest.raises(fa.errors.ArgumentError, match="the record is 'nf4'"):
        fa.big.load(empty(), tmp_path / "net.safetensors", quantization="nf4")
    model = empty()
    run = fa.big.load(model, tmp_path / "net.safetensors", "disk")
    with pytest.raises(fa.errors.OwnershipError, match="dispatched already"):
        fa.big.load(model, tmp_path / "net.safetensors")
    run.remove()
    fa.big.load(model, tmp_path / "net.safetensors")


def test_a_bar_of_bytes(tmp_path, capsys):
    save_model(net(), tmp_path / "net.safetensors")
    fa.big.load(empty(), tmp_path / "net.safetensors", show_progress=True)
    assert "100%" in capsys.readouterr().err


PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
import fnaccel as fa

def held():
    return {l.split()[0]: int(l.split()[1]) << 10 for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("Rss")}

with fa.big.empty():
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
import threading, time
most, done = [0], threading.Event()
def watch():
    while not done.is_set():
        most[0] = max(most[0], held()["RssAnon:"])
        time.sleep(0.0005)
before = held()["RssAnon:"]
thread = threading.Thread(target=watch); thread.start()
fa.big.load(model, sys.argv[1], dtype=getattr(torch, sys.argv[2]), readers=2)
done.set(); thread.join()
print(most[0] - before)
"""


@pytest.mark.long_except("float64")
@pytest.mark.parametrize(("dtype", "model"), [("float32", 0), ("float64", 12 * 2048 * 2048 * 8)])
def test_the_host_holds_the_model_and_a_tensor_a_reader(tmp_path, dtype, model):
    """Nothing is copied if the dtype is right. Else own pages grow by the new model and one tensor a reader."""
    path = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.zeros(2048, 2048) for i in range(12)}, path)
    words = [sys.executable, "-c", PEAK, str(path), dtype]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert int(done.stdout) <= model + 2 * 2048 * 2048 * 8 + (8 << 20)


def load_on_ranks(folder, broadcast):
    model = empty()
    fa.big.load(model, folder, broadcast=broadcast)
    return output(model)


def fail_on_ranks(folder):
    model = empty()
    with pytest.raises(fa.errors.FnaccelError) as error:
        fa.big.load(model, folder, broadcast=True)
    return str(error.value), all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("broadcast", [False, True])
def test_one_rank_reads_for_all_or_each_reads(pools, tmp_path, broadcast):
    sharded(tmp_path / "hf", net())
    found = pools.run(2, load_on_ranks, tmp_path / "hf", broadcast)
    assert all(torch.equal(logits, output(net())) for logits in found)


def test_an_error_of_the_reading_rank_is_one_of_all(pools, tmp_path):
    truncated(sharded(tmp_path / "hf", net()))
    first, second = pools.run(2, fail_on_ranks, tmp_path / "hf")
    assert "no whole safetensors file" in first[0]
    assert "rank 0" in second[0]
    assert first[1]
    assert second[1]
