"""Mistakes of users and damaged trees that once passed, or ended in a raw error."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CheckpointError, TreeMismatchError
from fnaccel.texts import bytes_in
from tests.checkpoint.training import gathered, make, train, unequal
from tests.interchange.test_adopt import net_state, of
from tests.interchange.test_export import loaded


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


class Three(nn.Module):
    """Two layers whose biases look alike, and one more."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(4, 3)
        self.c = nn.Parameter(torch.ones(7))


def write_run(file, groups):
    """One update of torch's optimizer, with the gradients 1, 2, 3… in the model's order."""
    net = Three()
    named = dict(net.named_parameters())
    for number, value in enumerate(named.values(), 1):
        value.grad = torch.full_like(value, float(number))
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in group]} for group in groups])
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return {name: optimizer.state[value]["exp_avg"] for name, value in named.items()}


@pytest.mark.parametrize(
    ("groups", "fits"),
    [
        ([["c"], ["a.weight", "a.bias", "b.weight", "b.bias"]], True),
        ([["a.weight", "b.weight"], ["c", "a.bias", "b.bias"]], True),
        ([["c"], ["b.weight", "b.bias", "a.weight", "a.bias"]], False),
        ([["c", "b.weight", "b.bias", "a.weight", "a.bias"]], False),
    ],
    ids=str,
)
def test_moments_go_where_they_belong_or_nowhere(world, tmp_path, groups, fits):
    """The model's own order is c, a.*, b.*: a parameter of the module itself comes first."""
    if fits and groups[1][0] == "c":
        groups = [groups[0], ["c", *groups[1][1:]]]
    moments = write_run(tmp_path / "run.pt", groups)
    state = of(Three).init()
    kept = gathered(state)
    if fits:
        state = fa.interchange.adopt(tmp_path / "run.pt", like=state)
        assert all(torch.equal(state.opt[name]["exp_avg"], value) for name, value in moments.items())
        return
    with pytest.raises(TreeMismatchError, match="each group of the optimizer keeps the model's order"):
        fa.interchange.adopt(tmp_path / "run.pt", like=state)
    assert unequal(gathered(state), kept) == []
    state = fa.interchange.adopt(tmp_path / "run.pt", like=state, skip="opt/*")
    assert not state.opt["c"]["exp_avg"].any()


def test_a_device_is_never_replaced(world, tmp_path):
    state = make("local()").init()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("mine")
    for name, words in {
        "fifo": "neither a file nor a directory",
        "link": "neither a file nor a directory",
        "loop": "a link that leads nowhere",
        "file": "is a file",
    }.items():
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=words):
                fa.interchange.export_hf(tmp_path / name, state, overwrite=overwrite)
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "mine"
    odd = tmp_path / "odd"
    odd.mkdir()
    os.mkfifo(odd / "fifo")
    with pytest.raises(CheckpointError, match="other things than files, and stays as it is: fifo"):
        fa.interchange.export_hf(odd, state, overwrite=True)
    with pytest.raises(ArgumentError, match="is no path"):
        fa.interchange.export_hf(f"{tmp_path}/a\0b", state)


def test_links_are_followed(world, tmp_path, monkeypatch):
    state = make("local()").init()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "new").symlink_to(tmp_path / "later")
    for name in ("link", "new"):
        for overwrite in (False, True):
            fa.interchange.export_hf(tmp_path / name, state, overwrite=overwrite)
        assert (tmp_path / name).is_symlink()
    assert loaded(tmp_path / "real").keys() == loaded(tmp_path / "later").keys() != set()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(CheckpointError, match="this process runs in"):
        fa.interchange.export_hf(".", state)
    fa.interchange.export_hf("exported", state)
    assert [path.name for path in here.iterdir()] == ["exported"]


def test_overwriting_removes_weights_alone(world, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    kept = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "vocab.index.json"]
    gone = ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "model-1.safetensors"]
    for name in kept + gone:
        (target / name).write_text(name)
    fa.interchange.export_hf(target, make("local()").init(), overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == sorted([*kept, "model.safetensors"])
    assert all((target / name).read_text() == name for name in kept)


class Slashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("enc/a~1", nn.Parameter(torch.randn(2)))
        self.layers = nn.ModuleDict({"x/y": nn.Linear(2, 3)})
        self.tied = self.layers["x/y"].weight
        self.register_buffer("run/mean", torch.randn(2))
        self.register_buffer("run/mask", torch.ones(2), persistent=False)


NAMES = ["enc/a~1", "layers.x/y.bias", "run/mean", "tied"]


@pytest.mark.parametrize("count", [1, 2])
def test_names_with_slashes(world, tmp_path, count):
    def loss(model, batch):
        models = model.values() if isinstance(model, dict) else [model]
        return sum(p.square().sum() for one in models for p in one.parameters())

    keyed = dict.fromkeys(("g", "d"), Slashed)
    step = fa.train_step(
        loss, model=fa.distribute(Slashed if count == 1 else keyed, "local"), optimizer=fa.adamw(0.1)
    )
    state, _ = step(step.init(seed=1), torch.ones(1))
    wanted = gathered(state)
    fa.save(tmp_path / "own", state)
    options = {} if count == 1 else {"model": "g"}
    fa.interchange.export_hf(tmp_path / "live", state, **options)
    fa.interchange.export_hf(tmp_path / "disk", tmp_path / "own", **options)
    assert sorted(loaded(tmp_path / "live")) == NAMES
    assert unequal(loaded(tmp_path / "live"), loaded(tmp_path / "disk")) == []
    if count == 2:
        with pytest.raises(ArgumentError, match="there are 2 models"):
            fa.interchange.export_hf(tmp_path / "no", tmp_path / "own")
    else:
        params = fa.interchange.adopt(tmp_path / "live", like=dict(state.params), skip="params/run/*")
        assert unequal(gathered(params), gathered(state.params)) == []
        other = fa.interchange.adopt(tmp_path / "live", like=step.init(seed=2))
        assert torch.equal(other.buffers["run/mean"], wanted["buffers/run/mean"])
    from fnaccel.cli.main import main

    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "again"), "--to", "fnaccel"]) == 0
    for source in ("own", "again"):
        found = gathered(fa.interchange.adopt(tmp_path / source, like=step.init(seed=3)))
        same = [path for path in wanted if path.startswith(("params", "buffers", "opt"))]
        assert unequal({path: found[path] for path in same}, {path: wanted[path] for path in same}) == []


def test_an_index_that_lists_what_is_nowhere(world, tmp_path):
    state = make("local()").init()
    content = net_state()
    for kind, index in (
        ("safetensors", "model.safetensors.index.json"),
        ("bin", "pytorch_model.bin.index.json"),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        name = "model-1.safetensors" if kind == "safetensors" else "pytorch_model-1.bin"
        (save_file if kind == "safetensors" else torch.save)(content, folder / name)
        (folder / index).write_text(
            json.dumps({"weight_map": dict.fromkeys([*content, "lost.weight"], name)})
        )
        with pytest.raises(CheckpointError, match=r"lost\.weight is in .*none of its files \(1 in all"):
            fa.interchange.adopt(folder, like=state, skip="params/lost*")


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.int8, "can't hold"), (torch.complex64, "can't hold"), (3, "is a int"), (["bf16"], "is a list")],
    ids=str,
)
def test_only_floating_dtypes(world, tmp_path, dtype, words):
    state = make("local()").init()
    fa.save(tmp_path / "own", state)
    for source in (state, tmp_path / "own"):
        with pytest.raises(ArgumentError, match=words):
            fa.interchange.export_hf(tmp_path / "out", source, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_renames_that_are_none(world, tmp_path):
    state = make("local()").init()
    for rename, words in (
        ("abc", "rename= is a str"),
        ({"^a": 3}, "in the place of"),
        ({3: "a"}, "something else than text"),
        ({"^(f)": r"\9"}, "in the place of"),
        ({"^f": r"\g<x>"}, "in the place of"),
    ):
        with pytest.raises(ArgumentError, match=words):
            fa.interchange.export_hf(tmp_path / "out", state, rename=rename)
    with pytest.raises(ArgumentError, match="is no number of bytes"):
        bytes_in("9" * 400, "here", least=1)
    assert not list(tmp_path.iterdir())


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 5)


def test_a_prefix_that_would_fit_is_named(world, tmp_path):
    state = of(Headed).init()
    base = Headed().transformer.state_dict()
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(TreeMismatchError) as raised:
        fa.interchange.adopt(tmp_path / "base.safetensors", like=state)
    rename = {r"^params/": "params/transformer."}
    assert 'rename={r"^params/": "params/transformer."}' in raised.value.fix
    state = fa.interchange.adopt(
        tmp_path / "base.safetensors", like=state, rename=rename, skip="params/head.*"
    )
    assert torch.equal(state.params["transformer.0.weight"], base["0.weight"])
    save_file(base | {"odd": torch.ones(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(TreeMismatchError) as raised:
        fa.interchange.adopt(tmp_path / "odd.safetensors", like=state)
    assert "makes the names fit" not in raised.value.fix


def test_an_empty_file_says_why(world, tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        fa.interchange.adopt(tmp_path / "a.pt", like=make("local()").init())
    assert not raised.value.what.endswith(": ")


def test_a_snapshot_has_no_module_to_ask(world, tmp_path):
    """As the documentation says: nothing tells which of its buffers a module would not save."""
    step = of(Slashed)
    state = step.init()
    fa.interchange.export_hf(tmp_path / "live", state)
    fa.interchange.export_hf(tmp_path / "copy", fa.snapshot(state))
    assert loaded(tmp_path / "copy").keys() - loaded(tmp_path / "live").keys() == {"run/mask"}
    train(make("local()"), make("local()").init(), 0, 0)
    assert sorted(load_file(tmp_path / "live" / "model.safetensors")) == NAMES
