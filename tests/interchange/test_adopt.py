"""`adopt`: files of tensors into live states of any layout; what does not fit changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fnaccel as fa
from fnaccel.errors import (
    ArgumentError,
    CapabilityError,
    StaleStateError,
    TreeMismatchError,
)
from tests.checkpoint.training import Net, gathered, make, train, unequal
from tests.interchange.hf_models import IDS, MODELS, logits, trained

RANKS = [("local()", 1), ("ddp()", 2), ("fsdp()", 2), ("fsdp()", 3), ("fsdp(init='meta')", 2)]


def net_state(seed=7, width=5):
    torch.manual_seed(seed)
    net = Net(width)
    for _ in range(2):
        net(torch.randn(8, 7))  # moves the running statistics
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def by_name(leaves):
    """Parameters and buffers of a gathered state, without sections."""
    return {
        path.partition("/")[2]: value
        for path, value in leaves.items()
        if path.startswith(("params/", "buffers/"))
    }


def into(layout, path, options):
    step = make(layout)
    state = step.init(seed=4)
    adopted = fa.interchange.adopt(path, like=state, **options)
    found = gathered(adopted)
    train(step, adopted, 0, 1)
    return found


@pytest.mark.long_except(r"local|'fsdp\(\)', 2")
@pytest.mark.parametrize("layout", RANKS, ids=str)
def test_any_layout_takes_any_file(pools, tmp_path, layout):
    wanted = net_state()
    save_file(wanted, tmp_path / "whole.safetensors")
    half = len(wanted) // 2
    split = tmp_path / "split"
    split.mkdir()
    parts = dict(list(wanted.items())[:half]), dict(list(wanted.items())[half:])
    for number, part in enumerate(parts):
        save_file(
            {f"module._orig_mod.{name}": x for name, x in part.items()}, split / f"{number}.safetensors"
        )
    torch.save({"model": wanted, "epoch": 3}, tmp_path / "some.pt")
    torch.save(wanted, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    binary = tmp_path / "binary"
    binary.mkdir()
    index = {}
    for number, part in enumerate(parts):
        torch.save(part, binary / f"pytorch_model-{number}.bin")
        index |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    (binary / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("whole.safetensors", "split", "some.pt", "old.pth", "binary"):
        for found in pools.run(layout[1], into, layout[0], tmp_path / name, {}):
            assert unequal(by_name(found), wanted) == [], name
            averages = {p.partition("/")[2]: x for p, x in found.items() if p.startswith("ema/")}
            assert all(torch.equal(value, wanted[path]) for path, value in averages.items())
            assert found["step"] == 0


def copied(name, layout, source):
    step, state = trained(name, layout, updates=0)
    state = fa.interchange.adopt(source, like=state)
    return step.look(state, logits, IDS)


@pytest.mark.long_except("gpt2")
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saved(pools, tmp_path, name):
    torch.manual_seed(5)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "hf", max_shard_size="2KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    # all names, tied ones twice, as torch.save of a state dict has them
    torch.save(model.state_dict(), tmp_path / "doubled.bin")
    for source in ("hf", "doubled.bin"):
        for layout, ranks in RANKS:
            for found in pools.run(ranks, copied, name, layout, tmp_path / source):
                assert torch.allclose(found, logits(model, IDS), atol=1e-6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.inner.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("scale", torch.ones(2))


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


def of(factory, optimizer=None):
    def loss(model, batch):
        return sum(p.square().sum() for p in model.parameters())

    return fa.train_step(loss, model=fa.distribute(factory, "local"), optimizer=optimizer or fa.adamw(0.1))


def test_tied_names_and_buffers_that_are_not_saved(world, tmp_path):
    weight, scale = torch.randn(6, 3), torch.randn(2)
    step = of(Tied)
    state = step.init()
    for number, names in enumerate((["inner.weight"], ["head.weight"], ["inner.weight", "head.weight"])):
        file = tmp_path / f"{number}.safetensors"
        save_file({"scale": scale} | {name: weight.clone() for name in names}, file)
        state = fa.interchange.adopt(file, like=state)
        assert torch.equal(state.params["inner.weight"], weight)
        assert torch.equal(state.buffers["scale"], scale)
        assert torch.equal(state.buffers["mask"], torch.ones(2))
    for other in (weight + 1, weight[:3].clone()):
        two = {"inner.weight": weight, "head.weight": other, "scale": scale}
        save_file(two, tmp_path / "two.safetensors")
        with pytest.raises(TreeMismatchError, match=r"params/inner\.weight: "):
            fa.interchange.adopt(tmp_path / "two.safetensors", like=state)
    save_file({"inner.weight": weight}, tmp_path / "3.safetensors")
    with pytest.raises(TreeMismatchError, match=r"buffers/scale: only in like \(float32 \[2\]\)"):
        fa.interchange.adopt(tmp_path / "3.safetensors", like=state)
    state = fa.interchange.adopt(tmp_path / "3.safetensors", like=state, skip="buffers")


def test_every_mismatch_is_listed_and_nothing_changes(world, tmp_path):
    content = net_state(width=6)
    content["extra.weight"] = torch.ones(2)
    content["blocks.0.norm.num_batches_tracked"] = torch.ones(())
    del content["last.bias"]
    save_file(content, tmp_path / "other.safetensors")
    step = make("local()")
    state = step.init(seed=4)
    kept = gathered(state)
    with pytest.raises(TreeMismatchError) as raised:
        fa.interchange.adopt(tmp_path / "other.safetensors", like=state)
    said = raised.value.what
    for line in (
        "params/first.weight: float32 [6, 7] in the source, float32 [5, 7] in like",
        "params/last.bias: only in like (float32 [1])",
        "params/extra.weight: only in the source (float32 [2])",
        "buffers/blocks.0.norm.num_batches_tracked: float32 [] in the source, int64 [] in like",
        "ema/blocks.1.line.weight: ",
    ):
        assert line in said, line
    assert "num_batches_tracked: int64" not in said
    assert unequal(gathered(state), kept) == []
    train(step, state, 0, 1)


def fails(path):
    step = make("fsdp()")
    state = step.init(seed=4)
    with pytest.raises(fa.errors.FnaccelError) as raised:
        fa.interchange.adopt(path, like=state)
    train(step, state, 0, 1)
    return raised.value.what


def test_all_ranks_raise_and_the_state_lives(pools, tmp_path):
    save_file({"first.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    assert all("paths differ" in said for said in pools.run(2, fails, tmp_path / "a.safetensors"))


def test_patterns_and_names(world, tmp_path):
    wanted = net_state()
    changed = {name.replace("blocks.", "layers/").replace("line", "linear"): x for name, x in wanted.items()}
    save_file(changed, tmp_path / "a.safetensors")
    step = make("local()")
    state = fa.interchange.adopt(
        tmp_path / "a.safetensors",
        like=step.init(seed=4),
        rename={"layers/": "blocks.", "linear": "line"},
        skip=["params/last.*", "ema/last.*"],
    )
    found = by_name(gathered(state))
    assert set(unequal(found, wanted)) == {"last.weight", "last.bias"}
    before = gathered(state)
    torch.save({"last.bias": torch.full((1,), 9.0)}, tmp_path / "b.pt")
    state = fa.interchange.adopt(tmp_path / "b.pt", like=state, only="params/last.bias")
    assert unequal(gathered(state), before) == ["params/last.bias"]
    with pytest.raises(ArgumentError, match="matches no path"):
        fa.interchange.adopt(tmp_path / "b.pt", like=state, only="params/lost")
    with pytest.raises(ArgumentError, match="both params/x"):
        fa.interchange.adopt(tmp_path / "a.safetensors", like=state, rename=lambda path: "params/x")


def test_dtypes_are_converted(world, tmp_path):
    wanted = net_state()
    save_file(
        {name: x.bfloat16() if x.is_floating_point() else x for name, x in wanted.items()},
        tmp_path / "a.safetensors",
    )
    state = fa.interchange.adopt(tmp_path / "a.safetensors", like=make("local()").init())
    assert state.params["first.weight"].dtype == torch.float32
    assert torch.equal(state.params["first.weight"], wanted["first.weight"].bfloat16().float())


def test_values_that_would_be_cut_off(world, tmp_path):
    save_file({"a": torch.tensor([500.0, -2.0]), "b": torch.tensor([1e5])}, tmp_path / "a.safetensors")
    like = {"a": torch.zeros(2, dtype=torch.float8_e4m3fn), "b": torch.zeros(1, dtype=torch.float16)}
    with pytest.raises(TreeMismatchError) as raised:
        fa.interchange.adopt(tmp_path / "a.safetensors", like=like)
    assert "params/a: holds 500, and float8_e4m3fn ends at 448" in str(raised.value)
    assert "params/b: holds 100000, and float16 ends at 65504" in str(raised.value)
    wide = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(1, dtype=torch.bfloat16)}
    assert fa.interchange.adopt(tmp_path / "a.safetensors", like=wide)["a"].tolist() == [500.0, -2.0]


def test_other_trees(world, tmp_path):
    wanted = net_state()
    save_file(wanted, tmp_path / "a.safetensors")
    step = make("local()")
    state = step.init(seed=4)
    kept = gathered(state)
    params = fa.interchange.adopt(tmp_path / "a.safetensors", like=state.params, skip="*.norm.*")
    assert torch.equal(params["first.weight"], wanted["first.weight"])
    tree = {"params": state.params, "buffers": state.buffers, "note": "mine"}
    found = fa.interchange.adopt(tmp_path / "a.safetensors", like=tree)
    assert found["note"] == "mine"
    assert unequal(by_name(gathered(found)), wanted) == []
    copy = fa.interchange.adopt(tmp_path / "a.safetensors", like=fa.snapshot(state))
    assert unequal(gathered(state), kept) == []
    state = step.adopt(copy)
    assert unequal(by_name(gathered(state)), wanted) == []
    with pytest.raises(ArgumentError, match="like= is a list"):
        fa.interchange.adopt(tmp_path / "a.safetensors", like=[1])
    with pytest.raises(ArgumentError, match="params/a in like= is a list"):
        fa.interchange.adopt(tmp_path / "a.safetensors", like={"a": [1]})


def test_several_models(world, tmp_path):
    def both(model, batch):
        return model["a"](batch).mean() + model["b"](batch).mean()

    models = {"a": lambda: nn.Linear(2, 1), "b": lambda: nn.Linear(2, 3)}
    step = fa.train_step(both, model=fa.distribute(models, "local"), optimizer=fa.sgd(0.1))
    state = step.init()
    weights = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
    save_file(weights, tmp_path / "b.safetensors")
    kept = state.params["a"]["weight"].detach().clone()
    state = fa.interchange.adopt(
        tmp_path / "b.safetensors", like=state, rename={"^params/": "params/b/"}, skip="params/a"
    )
    assert torch.equal(state.params["b"]["weight"], weights["weight"])
    assert torch.equal(state.params["a"]["weight"], kept)
    fa.save(tmp_path / "own", state)
    again = fa.interchange.adopt(tmp_path / "own", like=fa.snapshot(state))
    assert torch.equal(again.params["b"]["bias"], weights["bias"])
    # other tools have names only, in which "/" may lead into a dict; also where they were converted
    save_file({f"b/{name}": x + 1 for name, x in weights.items()}, tmp_path / "c.safetensors")
    fa.save(tmp_path / "flat", {"params": {f"b/{name}": x + 1 for name, x in weights.items()}})
    for source in ("c.safetensors", "flat"):
        again = fa.interchange.adopt(tmp_path / source, like=fa.snapshot(state), skip=["params/a", "buffers"])
        assert torch.equal(again.params["b"]["bias"], weights["bias"] + 1)


def moved(layout, directory, write):
    step = make(layout, transform=lambda s: s if write else fa.with_ema(s, 0.9))
    state = step.init(seed=4)
    if write:
        state = train(step, state, 0, 3)
        fa.save(directory, state)
    else:
        state = fa.interchange.adopt(directory, like=state)
    return gathered(state)


def test_our_own_checkpoints(pools, tmp_path):
    """Other transforms, so `restore` would refuse: weights, moments and counts come over."""
    wanted = pools.run(2, moved, "fsdp()", tmp_path, True)[0]
    found = pools.run(1, moved, "local()", tmp_path, False)[0]
    assert [path for path in unequal(found, wanted) if not path.startswith(("ema", "data"))] == []
    assert found["updates"] == 3
    assert torch.equal(found["ema/first.weight"], wanted["params/first.weight"])
    torch_own = {"a": torch.arange(3.0), "b": {"c": torch.ones(2)}}
    with fa.start(device="cpu"):
        fa.save(tmp_path / "plain", torch_own)
        assert torch.equal(
            fa.interchange.adopt(tmp_path / "plain", like={"a": torch.zeros(3)}, only="params/a")["a"],
            torch_own["a"],
        )


def partly(path):
    step = make("fsdp(init='meta')")
    state = step.init()
    for skip in ("params/last.bias", "ema"):
        with pytest.raises(CapabilityError, match="not all of them are restored"):
            fa.interchange.adopt(path, like=state, skip=[skip, f"{skip.replace('params', 'ema')}*"])
    train(step, fa.interchange.adopt(path, like=state), 0, 1)


def test_a_model_without_values_takes_all_of_them(pools, tmp_path):
    save_file(net_state(), tmp_path / "a.safetensors")
    pools.run(2, partly, tmp_path / "a.safetensors")


def test_a_donated_like(world, tmp_path):
    save_file(net_state(), tmp_path / "a.safetensors")
    step = make("local()")
    state = step.init()
    following = fa.interchange.adopt(tmp_path / "a.safetensors", like=state)
    with pytest.raises(StaleStateError):
        fa.interchange.adopt(tmp_path / "a.safetensors", like=state)
    train(step, following, 0, 1)
