"""What Accelerate's `save_state` wrote: weights, moments and counts come over, and the run goes on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn

import fnaccel as fa
from fnaccel.errors import CheckpointError, TreeMismatchError
from fnaccel.world.world import current
from tests.checkpoint.training import Net, gathered, make, train, unequal

ADAMW = {"lr": 1e-2, "weight_decay": 0.01}


def rows(number):
    made = torch.Generator().manual_seed(number)
    return torch.randn(13, 7, generator=made), torch.randn(13, 1, generator=made)


def advance(net, optimizer, first, count):
    """Steps as `train` makes them: the same rows, the mean of squares."""
    for number in range(first, first + count):
        x, y = rows(number)
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepared(make_optimizer, updates=3):
    torch.manual_seed(11)
    accelerator = Accelerator(cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(net, make_optimizer(net))
    advance(net, optimizer, 0, updates)
    return accelerator, net, optimizer


def plain(net):
    return torch.optim.AdamW(net.parameters(), **ADAMW)


def grouped(net):
    """Decay and no decay, as is the habit: the order of parameters is not the model's any more."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for p in net.parameters() if p.dim() != 1]},
        ],
        **ADAMW,
    )


def named(net):
    return torch.optim.AdamW(list(net.named_parameters())[::-1], **ADAMW)


def state_of(net):
    return {name: x.detach().clone() for name, x in net.state_dict().items()}


def moments_of(net, optimizer):
    names = {id(p): name for name, p in net.named_parameters()}
    inner = getattr(optimizer, "optimizer", optimizer)
    return {
        f"opt/{names[id(p)]}/{slot}": x.detach().clone()
        for p, slots in inner.state.items()
        for slot, x in slots.items()
        if slot != "step" and x is not None
    }


def adopted(layout, path, options):
    step = make(layout, transform=lambda s: s)
    state = fa.interchange.adopt(path, like=step.init(seed=4), **options)
    before = gathered(state)
    return before, gathered(train(step, state, 3, 2))


def weights(found):
    return {p.partition("/")[2]: x for p, x in found.items() if p.startswith(("params", "buffers"))}


@pytest.mark.long_except(r"True")
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("make_optimizer", [plain, grouped, named], ids=lambda fn: fn.__name__)
def test_save_state(pools, tmp_path, make_optimizer, safe):
    accelerator, net, optimizer = prepared(make_optimizer)
    accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    wanted, moments = state_of(net), moments_of(net, optimizer)
    for layout, ranks in (("local()", 1), ("fsdp()", 2), ("fsdp()", 3)):
        for before, _ in pools.run(ranks, adopted, layout, tmp_path / "state", {}):
            assert unequal(weights(before), wanted) == []
            assert unequal({p: x for p, x in before.items() if p in moments}, moments) == []
            assert before["updates"] == before["step"] == 3
    if make_optimizer is plain:
        advance(net, optimizer, 3, 2)
        [(_, after)] = pools.run(1, adopted, "local()", tmp_path / "state", {})
        for name, value in weights(after).items():
            assert torch.allclose(value.double(), state_of(net)[name].double(), atol=1e-6), name
    [(before, _)] = pools.run(1, adopted, "local()", tmp_path / "state", {"skip": "opt"})
    assert before["updates"] == 0
    assert not before["opt/first.weight/exp_avg"].any()


@pytest.fixture
def world():
    with fa.start(device="cpu") as found:
        yield found


def refused(path, words, **options):
    step = make("local()", **options)
    state = step.init()
    kept = gathered(state)
    with pytest.raises((TreeMismatchError, CheckpointError), match=words) as raised:
        fa.interchange.adopt(path, like=state)
    assert 'skip="opt/*"' in raised.value.fix
    assert unequal(gathered(state), kept) == []
    state = fa.interchange.adopt(path, like=state, skip="opt/*")
    train(step, state, 0, 1)


def test_moments_that_do_not_fit(world, tmp_path):
    accelerator, _, _ = prepared(plain)
    accelerator.save_state(tmp_path / "state")
    refused(tmp_path / "state", "momentum_buffer: only in like", optimizer=fa.sgd(0.1, momentum=0.9))
    content = torch.load(tmp_path / "state" / "optimizer.bin")
    # one parameter fewer: no number can be trusted
    fewer = copy.deepcopy(content)
    fewer["param_groups"][0]["params"].pop()
    del fewer["state"][max(fewer["state"])]
    torch.save(fewer, tmp_path / "state" / "optimizer.bin")
    refused(tmp_path / "state", "opt/parameter number 0/exp_avg: only in the source")
    # groups that no shape tells apart
    mixed = copy.deepcopy(content)
    numbers = mixed["param_groups"][0]["params"]
    mixed["param_groups"] = [{"params": numbers[1::2]}, {"params": numbers[::2]}]
    torch.save(mixed, tmp_path / "state" / "optimizer.bin")
    refused(tmp_path / "state", "parameter number")
    uneven = copy.deepcopy(content)
    uneven["state"][0]["step"] += 1
    torch.save(uneven, tmp_path / "state" / "optimizer.bin")
    refused(tmp_path / "state", "counts 3 updates of .* up to 4")
    torch.save({"a": 1}, tmp_path / "state" / "optimizer.bin")
    with pytest.raises(CheckpointError, match="no state of a torch optimizer"):
        fa.interchange.adopt(tmp_path / "state", like=make("local()").init())


def test_momentum(world, tmp_path):
    def sgd(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    accelerator, net, optimizer = prepared(sgd)
    accelerator.save_state(tmp_path / "state")
    moments = moments_of(net, optimizer)
    assert moments
    step = make("local()", optimizer=fa.sgd(0.1, momentum=0.9))
    state = fa.interchange.adopt(tmp_path / "state", like=step.init())
    found = gathered(state)
    assert unequal({p: x for p, x in found.items() if p in moments}, moments) == []
    assert state.updates == 0  # SGD counts nothing


def test_several_models(world, tmp_path):
    accelerator = Accelerator(cpu=True)
    _, second = accelerator.prepare(nn.Linear(2, 1), nn.Linear(3, 1))
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="several models"):
        fa.interchange.adopt(tmp_path / "state", like=make("local()").init())
    like = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    found = fa.interchange.adopt(tmp_path / "state" / "model_1.safetensors", like=like)
    assert torch.equal(found["weight"], second.weight)


def sharded(directory, layout, flat):
    """What accelerate.utils.fsdp_utils writes for SHARDED_STATE_DICT: the same calls on the same trees."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(11)
    net = Net()
    mesh = init_device_mesh("cpu", (current().size,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    advance(net, optimizer, 0, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    trees = {
        "pytorch_model_fsdp_0": {"model": get_model_state_dict(net)},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(net, optimizer, options=options)},
    }
    for name, tree in trees.items():
        dcp.save(tree, storage_writer=dcp.FileSystemWriter(directory / name))
    whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in state_of(net).items()}
    return whole, {p: x.full_tensor() for p, x in moments_of(net, optimizer).items()}


@pytest.mark.long_except("True")
@pytest.mark.parametrize("flat", [False, True])
def test_shards_of_fsdp(pools, tmp_path, flat):
    wanted, moments = pools.run(2, sharded, tmp_path / "state", "fsdp", flat)[0]
    (tmp_path / "state" / "random_states_0.pkl").write_bytes(b"never read")
    for layout, ranks in (("local()", 1), ("fsdp()", 2), ("fsdp()", 3)):
        for before, _ in pools.run(ranks, adopted, layout, tmp_path / "state", {"trust_pickle": True}):
            assert unequal(weights(before), wanted) == []
            assert unequal({p: x for p, x in before.items() if p in moments}, moments) == []
            assert before["updates"] == 3
    with fa.start(device="cpu"), pytest.raises(CheckpointError, match="is a pickle") as raised:
        fa.interchange.adopt(tmp_path / "state", like=make("local()").init())
    assert "trust_pickle=True" in raised.value.fix


def test_the_whole_state_of_fsdp(world, tmp_path):
    """FULL_STATE_DICT: files of torch.save, the optimizer's by name."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    torch.manual_seed(11)
    net = Net()
    optimizer = plain(net)
    advance(net, optimizer, 0, 3)
    torch.save(net.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save(get_optimizer_state_dict(net, optimizer), tmp_path / "optimizer.bin")
    found = gathered(fa.interchange.adopt(tmp_path, like=make("local()").init()))
    moments = moments_of(net, optimizer)
    assert unequal(weights(found), state_of(net)) == []
    assert unequal({p: x for p, x in found.items() if p in moments}, moments) == []
    assert found["updates"] == 3
