"""`fnaccel convert`: any format to any other, in one process, without a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import fnaccel as fa
from fnaccel.cli.main import main
from tests.checkpoint.training import Net, gathered, make, train, unequal
from tests.interchange.test_accelerate import ADAMW, advance, moments_of, state_of
from tests.interchange.test_adopt import by_name, net_state


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


def convert(*arguments):
    return main(["convert", *map(str, arguments)])


def equal(directory, wanted):
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return unequal(found, wanted) == []


def test_ours_to_hugging_face(world, tmp_path, capsys):
    step = make("local()")
    state = train(step, step.init(seed=3), 0, 2)
    fa.save(tmp_path / "own", state)
    wanted = by_name(gathered(state))
    assert convert(tmp_path / "own", tmp_path / "hf", "--max-shard-size", "300") == 0
    assert equal(tmp_path / "hf", wanted)
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    said = capsys.readouterr()
    assert said.out == f"fnaccel -> hf: {tmp_path / 'hf'}\n"
    assert "B/s" in said.err  # the bar
    fa.interchange.export_hf(
        tmp_path / "wanted", state, ema=True, dtype="bf16", only="blocks.*", rename={"line": "linear"}
    )
    options = ("--ema", "--dtype", "bf16", "--only", "blocks.*", "--rename", "line=linear")
    assert convert(tmp_path / "own", tmp_path / "some", *options) == 0
    assert equal(tmp_path / "some", load_file(tmp_path / "wanted" / "model.safetensors"))
    # one file, over one that is there only when asked
    assert convert(tmp_path / "own", tmp_path / "one.safetensors", "--to", "safetensors") == 0
    assert unequal(load_file(tmp_path / "one.safetensors"), wanted) == []
    again = ("--to", "safetensors", "--skip", "first.*")
    assert convert(tmp_path / "own", tmp_path / "one.safetensors", *again) == 2
    assert "one.safetensors exists" in capsys.readouterr().err
    assert convert(tmp_path / "own", tmp_path / "one.safetensors", *again, "--overwrite") == 0
    assert len(load_file(tmp_path / "one.safetensors")) == len(wanted) - 2
    assert not list(tmp_path.glob(".*"))


# torch says so where a process saves alone, as here it is to
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_any_to_ours_and_back(world, tmp_path):
    wanted = net_state()
    save_file(wanted, tmp_path / "a.safetensors")
    torch.save(wanted, tmp_path / "b.pt")
    accelerator = Accelerator(cpu=True)
    net = Net()
    net.load_state_dict(wanted)
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    dcp.save({"model": wanted}, checkpoint_id=tmp_path / "d")
    accelerator.save_model(net, tmp_path / "c")
    for name in ("a.safetensors", "b.pt", "c", "d"):
        target = tmp_path / f"own-{name}"
        options = ("--trust-pickle",) if name == "d" else ()
        assert convert(tmp_path / name, target, *options, "--max-shard-size", "300") == 0
        assert fa.checkpoint.latest(target).name == "step-0000000000"
        state = fa.interchange.adopt(target, like=make("local()").init(seed=9))
        assert unequal(by_name(gathered(state)), wanted) == []
        found = fa.restore(target, like={"params": {key: torch.zeros_like(x) for key, x in wanted.items()}})
        assert unequal(gathered(found["params"]), wanted) == []
        assert convert(target, tmp_path / f"hf-{name}") == 0
        assert equal(tmp_path / f"hf-{name}", wanted)
        assert convert(tmp_path / name, tmp_path / f"direct-{name}", *options, "--to", "hf") == 0
        assert equal(tmp_path / f"direct-{name}", wanted)


def test_moments(world, tmp_path, capsys):
    """With names they come along; without, the error says what to do."""
    accelerator = Accelerator(cpu=True)
    net = Net()
    for names in (False, True):
        given = list(net.named_parameters()) if names else net.parameters()
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(given, **ADAMW))
        advance(net, optimizer, 0, 2)
        accelerator._models, accelerator._optimizers = [net], [optimizer]
        accelerator.save_state(tmp_path / f"state-{names}")
        target = tmp_path / f"own-{names}"
        if not names:
            assert convert(tmp_path / "state-False", target) == 2
            assert "--skip 'opt/*'" in capsys.readouterr().err
            assert not target.exists()
            assert convert(tmp_path / "state-False", target, "--skip", "opt/*") == 0
            continue
        assert convert(tmp_path / "state-True", target) == 0
        state = fa.interchange.adopt(target, like=make("local()").init(seed=9))
        moments = moments_of(net, optimizer)
        found = gathered(state)
        assert unequal(by_name(found), state_of(net)) == []
        assert unequal({p: x for p, x in found.items() if p in moments}, moments) == []
        assert state.updates == 2


def test_what_is_refused(world, tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    for arguments, words in {
        (tmp_path / "lost", tmp_path / "x"): "there is nothing at",
        (tmp_path / "a.safetensors",): "the following arguments are required: TARGET",
        (tmp_path / "a.safetensors", full, "--to", "hf"): "is not empty",
        (tmp_path / "a.safetensors", tmp_path / "x", "--rename", "a"): "renames nothing",
        (tmp_path / "a.safetensors", tmp_path / "x", "--rename", "(=b"): "no regular expression",
        (tmp_path / "a.safetensors", tmp_path / "x", "--only", "b"): "matches no path",
        (tmp_path / "a.safetensors", tmp_path / "x", "--skip", "params"): "no tensor to write",
        (tmp_path / "a.safetensors", tmp_path / "x", "--ema"): "no averages",
        (tmp_path / "a.safetensors", tmp_path / "x", "--dtype", "bf61"): "bf61",
        (tmp_path / "a.safetensors", tmp_path / "x", "--from", "dcp"): "is a pickle",
    }.items():
        assert convert(*arguments) == 2, arguments
        assert words in capsys.readouterr().err, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "full"]
    assert convert(tmp_path / "a.safetensors", tmp_path / "x") == 0
    assert convert(tmp_path / "a.safetensors", tmp_path / "x") == 2
    assert "has a checkpoint of step 0" in capsys.readouterr().err
