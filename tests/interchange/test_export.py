"""`export_hf`: what transformers and safetensors load is what was trained, whatever the layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fnaccel as fa
from fnaccel.checkpoint.disk import durable
from fnaccel.errors import ArgumentError, CheckpointError, StaleStateError, UnknownNameError
from fnaccel.interchange.model_config import class_of
from fnaccel.texts import bytes_in
from tests.checkpoint.training import gathered, make, train
from tests.interchange.hf_models import IDS, gpt2, logits, loss, trained
from tests.tiny_models import program, whole_params

RANKS = [("local()", 1), ("ddp()", 2), ("fsdp()", 1), ("fsdp()", 2), ("fsdp()", 3)]


def loaded(directory):
    """All tensors of a directory, and where the index says that they are."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def exported(name, layout, directory, options):
    step, state = trained(name, layout)
    fa.interchange.export_hf(directory, state, **options)
    return step.look(state, logits, IDS)


@pytest.mark.parametrize("layout", RANKS, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_loads_it(pools, tmp_path, name, layout):
    target = tmp_path / "out"
    wanted = pools.run(layout[1], exported, name, layout[0], target, {"max_shard_size": "2KB"})[0]
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model, IDS), wanted)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    found = loaded(target)
    assert found.keys() == index["weight_map"].keys()
    assert "lm_head.weight" not in found or name == "llama"
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert len(set(index["weight_map"].values())) > 2
    for file in target.glob("*.safetensors"):
        assert sum(x.nbytes for x in load_file(file).values()) <= 2000
    assert json.loads((target / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert not list(tmp_path.glob(".*"))


def compiled(part, layout, directory):
    """Train a GPT-2 that the user compiled, or of which the user compiled a part, and export it."""

    def make():
        model = gpt2()
        if part == "model":
            return torch.compile(model, backend="eager")
        model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
        return model

    step = fa.train_step(loss, model=fa.distribute(make, layout), optimizer=fa.sgd(0.1))
    state, _ = step(step.init(seed=1), IDS)
    fa.interchange.export_hf(directory / "state", state)
    saved = fa.save(directory / "saved", state)
    fa.interchange.export_hf(directory / "checkpoint", saved)
    names = fa.interchange.gather_state_dict(state, only="*wte*")
    wanted = step.look(state, logits, IDS)
    return wanted, None if names is None else list(names)


@pytest.mark.long
@pytest.mark.parametrize("layout", [("local()", 1), ("fsdp()", 2)], ids=str)
@pytest.mark.parametrize("part", ["model", "block"])
def test_a_model_that_the_user_compiled_has_the_names_of_the_plain_one(pools, tmp_path, part, layout):
    wanted, names = pools.run(layout[1], compiled, part, layout[0], tmp_path)[0]
    assert names == ["transformer.wte.weight"]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "state", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model, IDS), wanted)
    assert json.loads((tmp_path / "state" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    assert loaded(tmp_path / "checkpoint").keys() == loaded(tmp_path / "state").keys()


def whole(layout, directory):
    step = make(layout)
    state = train(step, step.init(seed=3), 0, 2)
    fa.interchange.export_hf(directory / "params", state)
    fa.interchange.export_hf(directory / "ema", state, ema=True, dtype="bf16")
    fa.save(directory / "own", state)
    # a snapshot has no module to say which buffers are saved
    fa.interchange.export_hf(directory / "snapshot", fa.snapshot(state))
    return gathered({"params": state.params, "buffers": state.buffers, "ema": state.ema})


@pytest.mark.parametrize("layout", RANKS, ids=str)
def test_every_layout_writes_the_same(pools, tmp_path, layout):
    wanted = pools.run(layout[1], whole, layout[0], tmp_path)[0]
    plain = {path.partition("/")[2]: x for path, x in wanted.items() if not path.startswith("ema")}
    averages = {path.partition("/")[2]: x for path, x in wanted.items() if path.startswith("ema")}
    found = loaded(tmp_path / "params")
    assert [path.name for path in (tmp_path / "params").iterdir()] == ["model.safetensors"]
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert loaded(tmp_path / "snapshot").keys() == plain.keys()
    found = loaded(tmp_path / "ema")
    for name, value in found.items():
        expected = averages.get(name, plain[name])
        assert torch.equal(value, expected.bfloat16() if expected.is_floating_point() else expected)
    # and what is read from the checkpoint is the same, without any world
    for options in ({}, {"ema": True, "dtype": torch.bfloat16}):
        name = "ema" if options else "params"
        fa.interchange.export_hf(tmp_path / f"{name}-from", tmp_path / "own", **options)
        again = loaded(tmp_path / f"{name}-from")
        assert again.keys() == loaded(tmp_path / name).keys()
        assert all(torch.equal(value, again[key]) for key, value in loaded(tmp_path / name).items())


def full(layout, directory, kind):
    import errno

    from fnaccel.checkpoint.disk import durable
    from fnaccel.checkpoint.format import safetensors
    from fnaccel.world.world import current

    step = make(layout)
    state = step.init(seed=3)
    write, begin = durable.write, safetensors.write_file
    if current().rank == 0:

        def refuse(file, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        if kind == "write":
            durable.write = refuse
        elif kind == "open":  # before any tensor was gathered
            safetensors.write_file = refuse
    try:
        with pytest.raises(CheckpointError) as raised:
            fa.interchange.export_hf(directory, state, max_shard_size=300)
    finally:
        durable.write, safetensors.write_file = write, begin
    train(step, state, 0, 1)  # nobody is left waiting
    return raised.value.what


@pytest.mark.parametrize("kind", ["write", "open"])
def test_a_full_disk_raises_on_every_rank(pools, tmp_path, kind):
    first, second = pools.run(2, full, "fsdp()", tmp_path / "out", kind)
    assert "No space left" in first
    assert "rank 0 failed" in second
    assert not list(tmp_path.iterdir())


def test_a_target_that_is_not_free(pools, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    first, second = pools.run(2, full, "fsdp()", tmp_path / "out", "taken")
    assert "is not empty" in first
    assert "is not empty" in second


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


def test_overwriting_keeps_what_is_no_weight(world, tmp_path):
    target = tmp_path / "out"
    state = make("local()").init()
    fa.interchange.export_hf(target, state, max_shard_size=300)
    (target / "tokenizer.json").write_text("{}")
    fa.interchange.export_hf(target, state, overwrite=True, config={"model_type": "mine"})
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    (target / "inner").mkdir()
    with pytest.raises(CheckpointError, match="holds directories"):
        fa.interchange.export_hf(target, state, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names(world, tmp_path):
    state = make("local()").init()
    fa.interchange.export_hf(
        tmp_path / "out",
        state,
        only="blocks.*",
        skip=["*.gain", "*tracked"],
        rename={r"^blocks\.(\d)": r"layer.\1", "line": "linear"},
    )
    found = loaded(tmp_path / "out")
    assert "layer.1.linear.weight" in found
    assert len(found) == 10
    for options, words in {
        "nothing": ({"only": "block.*"}, "matches no path"),
        "one": ({"rename": {r"blocks\.\d": "b"}}, "both b."),
        "left": ({"skip": "*"}, "no tensor"),
        "model": ({"model": "gen"}, "no model is called 'gen'"),
        "size": ({"max_shard_size": "5 bananas"}, "is no number of bytes"),
        "config": ({"config": 3}, "config= is a int"),
        "json": ({"config": {"a": torch.ones(1)}}, "no JSON"),
    }.values():
        with pytest.raises(ArgumentError, match=words):
            fa.interchange.export_hf(tmp_path / "no", state, **options)
    with pytest.raises(UnknownNameError, match="bf61"):
        fa.interchange.export_hf(tmp_path / "no", state, dtype="bf61")
    with pytest.raises(ArgumentError, match="no averages"):
        fa.interchange.export_hf(tmp_path / "no", make("local()", transform=lambda s: s).init(), ema=True)
    with pytest.raises(ArgumentError, match="source is a dict"):
        fa.interchange.export_hf(tmp_path / "no", {})
    step = make("local()")
    old = step.init()
    train(step, old, 0, 1)
    with pytest.raises(StaleStateError):
        fa.interchange.export_hf(tmp_path / "no", old)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_several_models(world, tmp_path):
    def both(model, batch):
        return model["a"](batch).mean() + model["b"](batch).mean()

    models = {"a": lambda: torch.nn.Linear(2, 1), "b": lambda: torch.nn.Linear(2, 3)}
    step = fa.train_step(both, model=fa.distribute(models, "local"), optimizer=fa.sgd(0.1))
    state = step.init()
    fa.save(tmp_path / "own", state)
    for number, source in enumerate((state, tmp_path / "own")):
        fa.interchange.export_hf(tmp_path / str(number), source, model="b")
        assert loaded(tmp_path / str(number))["weight"].shape == (3, 2)
        with pytest.raises(ArgumentError, match="there are 2 models"):
            fa.interchange.export_hf(tmp_path / "no", source)
    with pytest.raises(ArgumentError, match="no model is called 'c'"):
        fa.interchange.export_hf(tmp_path / "no", state, model="c")


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="there is nothing at"):
        fa.interchange.export_hf(tmp_path / "out", tmp_path / "none")


def test_a_checkpoint_that_is_damaged_leaves_nothing(tmp_path):
    with fa.start(device="cpu"):
        path = fa.save(tmp_path / "own", {"params": {"a": torch.ones(4), "b": torch.ones(2)}})
    [shard] = path.glob("*.safetensors")
    a, b = torch.ones(4), torch.ones(2)
    for other in ({"params/c": b}, {"params/b": b.int()}, {"params/b": b[:1].clone()}):
        save_file({"params/a": a} | other, shard)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest.pop("crc32", None)  # an attacker can compute it, too
        manifest["files"][shard.name]["crc32"] = durable.checksum_of(shard)
        manifest["files"][shard.name]["size"] = shard.stat().st_size
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"otherwise than was said|can't be read"):
            fa.interchange.export_hf(tmp_path / "out", tmp_path / "own")
    assert [one.name for one in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("1.5 kb", 1500),
        ("2MiB", 2 << 20),
        (7, 7),
        pytest.param("7", 7, id="text"),
        ("3B", 3),
    ],
)
def test_sizes(text, count):
    assert bytes_in(text, "here", least=1) == count


def from_path(directory):
    return fa.interchange.export_hf(directory / "out", directory / "own")


def test_ranks_that_export_a_checkpoint_write_it_once(pools, tmp_path):
    with fa.start(device="cpu"):
        fa.save(tmp_path / "own", {"params": {"a": torch.arange(5.0)}})
    assert pools.run(3, from_path, tmp_path) == [tmp_path / "out"] * 3
    assert torch.equal(loaded(tmp_path / "out")["a"], torch.arange(5.0))


def test_values_are_aligned(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(2),
        "c": torch.ones(1, dtype=torch.half),
    }
    with fa.start(device="cpu"):
        fa.save(tmp_path / "own", {"params": tensors})
    fa.interchange.export_hf(tmp_path / "out", tmp_path / "own")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, value in tensors.items():
        assert entries[name]["data_offsets"][0] % value.element_size() == 0


def test_the_class_as_its_author_wrote_it():
    from torch.distributed.fsdp import FSDPModule

    sharded = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})  # as fully_shard makes it
    made = torch.nn.Linear(1, 1)
    assert class_of(made) == "Linear"
    made.__class__ = sharded
    assert class_of(made) == "Linear"


def test_buffers_that_a_module_does_not_save_are_left_out_from_disk_too(world, tmp_path):
    from tests.interchange.test_adopt import Tied, of

    state = of(Tied).init(seed=0)
    fa.save(tmp_path / "run", state)
    for source in (state, tmp_path / "run"):
        fa.interchange.export_hf(tmp_path / "hf", source, overwrite=True)
        assert sorted(load_file(tmp_path / "hf" / "model.safetensors")) == ["inner.weight", "scale"]


@pytest.mark.parametrize("most", ["5GB", "200B"])
def test_torch_files_on_request(tmp_path, most):
    """`pytorch_model.bin`, or several with their index, as transformers reads them."""
    with fa.start():
        train_step = program()
        state = train_step.init(seed=0)
        fa.interchange.export_hf(tmp_path / "a", state)
        path = fa.interchange.export_hf(
            tmp_path / "a", state, max_shard_size=most, safetensors=False, overwrite=True
        )
        expected = whole_params(state)
    files = sorted(file.name for file in path.iterdir())
    if most == "5GB":
        assert files == ["pytorch_model.bin"]
    else:
        index = json.loads((path / "pytorch_model.bin.index.json").read_text())["weight_map"]
        assert set(index.values()) == {name for name in files if name.endswith(".bin")}
        assert len(set(index.values())) > 1
        assert all(name in torch.load(path / file) for name, file in index.items())
    loaded = {}
    for file in path.glob("*.bin"):
        loaded |= torch.load(file)
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        torch.testing.assert_close(value, expected[name])
